"""The namespaces of the lab: whether this computer supports them, and entering them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from cloudddp.simulator.linux import kernel, programs, seccomp
from cloudddp.simulator.net.router import Router

_SETTINGS = (
    "user namespaces may be disabled: "
    "sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
)
_PRIVILEGES = "root lacks the privilege; in a container: run it with --privileged"


def unavailable_reason() -> str:
    """Return why namespace nodes cannot run here, in a sentence; '' if they can. Does not change this
    process."""
    if problem := programs.missing(programs.LAB):
        return problem
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, _try_everything().encode(errors="replace")[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        problem = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return problem if problem or code == 0 else f"the trial of namespaces exited with {code}"


def enter() -> None:
    """Move this process, which must have a single thread, to the lab's namespaces. Raises OSError."""
    if os.getuid():
        kernel.unshare_user_as_root()
    kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), flags=kernel.MS_REC | kernel.MS_PRIVATE)
    # /proc/PID/exe of a node's first process is this Python, as it was mounted when it was executed: through
    # a writable mount, root of the node could change its mode.
    for python in dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix))):
        kernel.bind(python, python, read_only=True)


def _try_everything() -> str:
    """Create one of everything that a node needs, in a process that ends. Return what failed."""
    try:
        enter()
        Router().set_up()
        root = Path("/tmp")  # noqa: S108  a mount point of this process only
        kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NODEV, "mode=755")
        for name in ("over", "usr", "proc"):
            (root / name).mkdir()
        kernel.mount("overlay", root / "usr", "overlay", kernel.MS_RDONLY, f"lowerdir={root}/over:/usr")
        kernel.unshare(
            kernel.CLONE_NEWPID | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWCGROUP
        )
        if not _can_mount_proc(root / "proc"):
            return (
                "mounting /proc is refused (in a container: run it with --privileged, or use process nodes)"
            )
        kernel.no_new_privileges()
        seccomp.install_filter()
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSPC, errno.EACCES):
            reason = _SETTINGS if os.getuid() else _PRIVILEGES
            return f"namespaces are refused: {error.strerror} ({reason})"
        return str(error)
    return ""


def _can_mount_proc(target: Path) -> bool:
    child = os.fork()
    if child == 0:  # /proc can be mounted only from inside the new pid namespace
        try:
            kernel.mount("proc", target, "proc")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
