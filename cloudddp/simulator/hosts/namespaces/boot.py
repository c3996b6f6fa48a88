"""Boots one node in namespaces of its own: `python -m cloudddp.simulator.hosts.namespaces.boot`.

It gets a NamespaceNode on stdin, creates the namespaces, prints `namespaces ready`, waits for `network ready`
(the simulator attaches the interface meanwhile), and forks the node's pid 1. With pid 1 everything on the
node ends; this process exits with its exit status (on_node.EXIT_STATUS). Standard library only; it never
returns to the lab's own namespaces.

What the node's owner wrote, such as bootcmd, runs only when no process in the node's pid namespace has more
privileges than the node may have: root of the node controls every process there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cloudddp.simulator.guest import init, log, sshd
from cloudddp.simulator.hosts.namespaces import rootfs
from cloudddp.simulator.hosts.namespaces.rootfs import USER_ID, NamespaceNode
from cloudddp.simulator.linux import kernel, seccomp

_FILES = (1024, 524288)  # soft and hard
_MAX_MESSAGE = 2000  # bytes of an error


def main() -> int:
    node = NamespaceNode.from_line(sys.stdin.readline())
    kernel.unshare(
        kernel.CLONE_NEWNET
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWCGROUP
    )
    kernel.set_hostname(node.setup.host_name)
    print("namespaces ready", flush=True)
    if sys.stdin.readline().strip() != "network ready":
        return 1
    _configure_network(node)
    kernel.unshare(kernel.CLONE_NEWPID)  # the next process that is forked is its pid 1
    errors, report = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(errors)
        _run_init(node, report)
    os.close(report)
    print(f"pid {first} {os.getpid()}", flush=True)
    _drop_privileges(())
    seccomp.install_filter()
    if error := os.read(errors, _MAX_MESSAGE).decode(errors="replace"):
        print(log.printable(error), file=sys.stderr, flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _run_init(node: NamespaceNode, report: int) -> None:
    """Run as pid 1 of the node. Never returns: writes an error of the boot to `report`, and exits."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        _redirect(os.devnull)  # from the simulator's pipes, to which root of the node could write
        rootfs.build(node)
        # Before any file is opened that the node's owner may have created.
        _drop_privileges(kernel.NODE_CAPABILITIES)
        _limit_open_files()
        _redirect("/var/log/init.log")
        ssh = sshd.Sshd(
            prepare=lambda: _confine_sshd(node, report),
            redirect=lambda: _redirect("/var/log/auth.log", mode=0o600),
        )
        seccomp.install_filter()
        ssh.await_ready()
        _close_descriptors(keep=(*ssh.descriptors, report))
        os.environ.clear()
        os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/root", LANG="C.UTF-8")
    except Exception as error:
        os.write(report, f"{node.setup.host_name}: {error}".encode(errors="replace"))
        os._exit(1)
    try:
        # Without execve: a second interpreter would take most of the boot time.
        init.main(ssh, report=report, chown_to_user=rootfs.chown_to_user)
    except Exception as error:
        log.write(f"init: {error!r}")
    finally:
        os._exit(1)


def _limit_open_files() -> None:
    """As systemd's DefaultLimitNOFILE=1024:524288."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = _FILES[1] if hard == resource.RLIM_INFINITY else min(hard, _FILES[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES[0], hard), hard))


def _confine_sshd(node: NamespaceNode, report: int) -> None:
    os.close(report)
    if not node.as_root:
        # As root, sshd requires other users, which the lab of an ordinary user does not have.
        kernel.unshare_user_as(USER_ID)
    seccomp.install_filter()


def _close_descriptors(*, keep: Iterable[int]) -> None:
    for descriptor in set(range(3, 256)) - set(keep):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _configure_network(node: NamespaceNode) -> None:
    """Configure the interface, which was moved here from the lab."""
    subprocess.run(["ip", "-batch", "-"], input=node.setup.network_commands, text=True, check=True)
    settings = Path("/proc/sys/net/ipv4")
    if not node.as_root:
        (settings / "ip_unprivileged_port_start").write_text("0")  # there, sshd runs as the login user
    last_group = USER_ID if node.as_root else 0  # the lab of an ordinary user has a single group
    (settings / "ping_group_range").write_text(f"0 {last_group}")  # ping has no capability here


def _drop_privileges(kept: Iterable[int]) -> None:
    """Drop all capabilities but `kept`. Until now, this is root of the computer or an ordinary user's
    root."""
    kernel.limit_capabilities(kept)
    kernel.no_new_privileges()


def _redirect(path: str, *, mode: int = 0o644) -> None:
    """Redirect stdout and stderr to a file, and stdin from /dev/null."""
    if path != os.devnull and not _is_regular(path):
        Path(path).unlink()  # a named pipe, for one, would block the boot
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


if __name__ == "__main__":
    sys.exit(main())
