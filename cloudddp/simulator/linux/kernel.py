"""System calls for namespaces, mounts and capabilities that Python 3.11 does not wrap.

Standard library only: it also runs inside a node that is still booting. Every function raises OSError with
the path or the name of the call. Constants come from linux/sched.h, linux/mount.h, linux/prctl.h and
linux/capability.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUSER, CLONE_NEWNS = 0x40000000, 0x10000000, 0x00020000
CLONE_NEWPID, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWCGROUP = 0x20000000, 0x04000000, 0x08000000, 0x02000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# What sshd and a node's own root need, by number from linux/capability.h. Capabilities that reach beyond the
# node (clock, modules, mounts, network configuration, raw disks) are missing. With ptrace (19) root sees who
# has which socket; it reaches the processes of its pid namespace only.
NODE_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 19, 29, 31})


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object, about: str = "") -> None:
    if getattr(_libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", about or None)


def unshare(namespaces: int) -> None:
    """Move this process (for the network: this thread) to new namespaces. A pid namespace starts at the next
    fork."""
    _call("unshare", namespaces)


def setns(namespace: Path, kind: int = 0) -> None:
    """Move this thread to a namespace. A process can enter a user namespace only while it has a single
    thread."""
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", handle, kind, about=str(namespace))
    finally:
        os.close(handle)


def unshare_user_as_root() -> None:
    """Enter a new user namespace in which this ordinary user is root, over the namespaces that it creates
    only."""
    user, group = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def unshare_user_as(user: int) -> None:
    """As root of a user namespace, continue as `user`; outside, both are the same ordinary user."""
    unshare(CLONE_NEWUSER)
    Path("/proc/self/uid_map").write_text(f"{user} 0 1")
    Path("/proc/self/gid_map").write_text(f"{user} 0 1")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2). `options` are comma separated and specific to the file system."""
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
        about=str(target),
    )


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Bind-mount `source` at `target`.

    Read-only takes a second mount, which must repeat the flags of the file system: an ordinary user may not
    drop them.
    """
    mount(str(source), target, flags=MS_BIND | MS_REC)
    if read_only:
        inherited = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | inherited | _atime_flags(target))


def _atime_flags(target: Path) -> int:
    # ST_NOATIME, ST_NODIRATIME and ST_RELATIME of statvfs(3), which mount(2) numbers differently.
    flags = os.statvfs(target).f_flag
    return sum(to for st, to in ((1024, 1024), (2048, 2048), (4096, 1 << 21)) if flags & st)


def unmount(target: Path) -> None:
    """Detach a mount now; it disappears when its last user is gone."""
    _call("umount2", os.fsencode(target), _MNT_DETACH, about=str(target))


def pivot_root(root: Path) -> None:
    """Make the mount point `root` the root of the file system, and detach the old one."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root on {os.uname().machine}")
    os.chdir(root)
    # pivot_root(".", ".") mounts the old root on top of the new one, so that no folder is needed for it.
    if _libc().syscall(number, b".", b".") != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"pivot_root: {os.strerror(error)}", str(root))
    unmount(Path())
    os.chdir("/")


def set_hostname(host: str) -> None:
    name = os.fsencode(host)
    _call("sethostname", name, len(name))


def die_with_parent(number: int) -> None:
    """Receive this signal when the thread that forked this process ends."""
    _call("prctl", _PR_SET_PDEATHSIG, number, 0, 0, 0)


def limit_capabilities(capabilities: Iterable[int]) -> None:
    """Drop all other capabilities, from the bounding set too: no program that is executed later regains
    one."""
    kept = set(capabilities)
    for number in range(int(_LAST_CAPABILITY.read_text()) + 1):
        if number not in kept:
            _call("prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)
    mask = sum(1 << number for number in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    # For each half: effective, permitted, inheritable.
    _call("capset", header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0))


def no_new_privileges() -> None:
    """Disable setuid for this process and its descendants."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
