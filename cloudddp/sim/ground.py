"""What the simulated nodes stand on: namespaces where this computer has them, loopback addresses elsewhere.

Decides, says why, and prepares this process; called once, while it has a single thread, because a process with
threads may not change its user namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp.sim import kernel, network, seccomp
from cloudddp.sim.router import LAPTOP, PUBLIC, Router

_GUARD_PORT = 61022  # above the ephemeral range of Linux, so that no outgoing connection sits on it
_SSH_PORTS = (22, 2222, 22022)
_PRIVATE = "172.31.0.0/16"  # the default VPC, as on EC2
_SWITCHES = (
    "user namespaces may be switched off: "
    "sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
)
_POWERS = "this root may not make them; in a container: run it with --privileged"


class Unavailable(Exception):
    """Nodes of that kind cannot be had here; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where nodes stand. `caller` is the laptop's address as they see it, or None where it is the caller's own."""

    kind: str
    why: str  # why not the better kind, or ''
    network: str
    ssh_port: int
    caller: str | None
    nodes: Any  # nodespec.Nodes
    router: Router | None
    doors: tuple[socket.socket, ...]  # where the API listens beside the first door
    keep: tuple[socket.socket, ...] = ()  # held open as long as the server runs


def prepare(home: Path, kind: str, *, port: int, ssh_port: int, interfaces: tuple[str, ...]) -> Ground:
    """Move this process to the ground of that kind. Raises Unavailable, OSError."""
    if kind == "process":
        return _loopback(home, ssh_port, why="asked for")
    why = obstacle()
    if not why:
        return _namespaces(home, port, interfaces)
    if kind == "namespace":
        raise Unavailable(f"namespace nodes cannot be had here: {why}")
    return _loopback(home, ssh_port, why=why)


def obstacle() -> str:
    """What is in the way of namespace nodes, in a sentence; '' where nothing is. Leaves this process as it was."""
    from cloudddp.sim import hosts

    if missing := hosts.missing():
        return f"{' and '.join(missing)} not installed (apt-get install {' '.join(missing)})"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, _trial().encode(errors="replace")[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said if said or code == 0 else f"the trial of namespaces ended with {code}"


def _trial() -> str:
    """Make one of everything that a node needs, in a process that ends; return what failed."""
    try:
        _enter_new()
        Router().set_up()
        place = Path("/tmp")  # noqa: S108  a mount point of this process alone
        kernel.mount("tmpfs", place, "tmpfs", kernel.NO_DEVICES, "mode=755")
        for name in ("over", "usr", "proc"):
            (place / name).mkdir()
        kernel.mount("overlay", place / "usr", "overlay", kernel.READ_ONLY, f"lowerdir={place}/over:/usr")
        kernel.unshare(kernel.NEW_PIDS | kernel.NEW_NAME | kernel.NEW_IPC | kernel.NEW_CGROUPS)
        child = os.fork()
        if child == 0:  # only in its own pid namespace may it have a /proc of its own
            try:
                kernel.mount("proc", place / "proc", "proc")
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return "a /proc of its own is refused (in a container: run it with --privileged, or use process nodes)"
        kernel.no_new_privileges()
        seccomp.confine()
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSPC, errno.EACCES):
            return f"namespaces are refused: {error.strerror} ({_SWITCHES if os.getuid() else _POWERS})"
        return str(error)
    return ""


def _enter_new() -> None:
    if os.getuid():
        kernel.become_root()
    kernel.unshare(kernel.NEW_NETWORK | kernel.NEW_MOUNTS)
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.PRIVATE)
    # A node's first process runs this Python, and /proc/PID/exe is that file as it was when it was executed: root of
    # the node could change its mode through a mount that may be written.
    for python in dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix))):
        kernel.bind(python, python, read_only=True)


def _namespaces(home: Path, port: int, interfaces: tuple[str, ...]) -> Ground:
    from cloudddp.sim import hosts

    as_root = os.getuid() == 0
    _enter_new()
    router = Router()
    router.set_up()
    network.place(_PRIVATE, public=PUBLIC)
    door = socket.create_server(("127.0.0.1", port), backlog=256)
    return Ground(
        kind="namespace",
        why="",
        network=_PRIVATE,
        ssh_port=22,
        caller=LAPTOP,
        nodes=hosts.NamespaceNodes(home, router, interfaces=interfaces, as_root=as_root),
        router=router,
        doors=(door,),
    )


def _loopback(home: Path, ssh_port: int, *, why: str) -> Ground:
    from cloudddp.sim.nodes import LoopbackNodes

    guard, addresses, ssh_port = _claim_network(ssh_port)
    network.place(addresses)
    return Ground(
        kind="process",
        why=why,
        network=addresses,
        ssh_port=ssh_port,
        caller=None,
        nodes=LoopbackNodes(home, ssh_port=ssh_port),
        router=None,
        doors=(),
        keep=(guard,),
    )


def _claim_network(ssh_port: int) -> tuple[socket.socket, str, int]:
    """A /16 of loopback nobody else simulates on; it is held as long as the returned socket is open.

    Raises Unavailable.
    """
    for number in range(64, 127):
        guard = _hold(f"127.{number}.0.1", _GUARD_PORT)
        if guard is None:
            continue
        for port in (ssh_port,) if ssh_port else _SSH_PORTS:
            if probe := _listen(f"127.{number}.0.1", port):
                probe.close()
                return guard, f"127.{number}.0.0/16", port
        guard.close()
        raise Unavailable(f"no SSH port for the nodes: tried {ssh_port or ', '.join(map(str, _SSH_PORTS))}")
    raise Unavailable("63 simulators run on this machine already")


def _hold(host: str, port: int) -> socket.socket | None:
    """Bind the port without listening. No SO_REUSEADDR, with which two processes could bind it."""
    held = socket.socket()
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        return None
    return held


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port))
    except OSError:
        return None
