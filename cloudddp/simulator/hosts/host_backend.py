"""Chooses the kind of hosts: namespaces if this computer supports them, loopback addresses otherwise;
machines only on request.

`select` prepares this process for them. Call it while there is a single thread, because a process with
several cannot change its user namespace.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from cloudddp.simulator.hosts import lab_namespaces
from cloudddp.simulator.hosts.lab_hosts import HostKind, LabHosts
from cloudddp.simulator.hosts.machines import root_image
from cloudddp.simulator.hosts.machines.kind import Machines
from cloudddp.simulator.hosts.namespaces.kind import Namespaces
from cloudddp.simulator.hosts.node_spec import NodeSpec
from cloudddp.simulator.net import addresses
from cloudddp.simulator.net.policy import LAPTOP, PUBLIC
from cloudddp.simulator.net.router import Router

_GUARD_PORT = 61022  # above Linux's ephemeral ports, so that no outgoing connection uses it
_SSH_PORTS = (22, 2222, 22022)
_VPC = "172.31.0.0/16"  # the default VPC, as on EC2


class Unavailable(Exception):
    """This kind of hosts is not available here; the message names what is missing."""


class Hosts(Protocol):
    """The hosts of one simulator. Calls block, come from any thread, and never overlap for one instance."""

    runs_timers: bool  # whether a node's own timers end it; else the lifecycle watches the deadlines
    on_end: Callable[[str, str], None]  # called with instance id and poweroff, reboot or crash

    def boot(self, spec: NodeSpec) -> None:
        """Return when the node is up. Raises OSError, ValueError."""

    def halt(self, instance_id: str) -> None:
        """End every process of the node and keep its files. No error for an unknown node."""

    def remove(self, instance_id: str) -> None:
        """As `halt`, and remove its files."""

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """Return ssh_port, home and processes (pids) of each node."""

    def moved_deadline(self, instance_id: str) -> datetime | None:
        """Return the node's deadline as it was changed on the node; None if it was not, or is not known."""

    def kill(self, instance_id: str) -> None:
        """End the node as a hardware failure would."""

    def freeze(self, instance_id: str) -> None:
        """Stop every process of the node. Raises ValueError."""

    def thaw(self, instance_id: str) -> None:
        """Undo `freeze`. Raises ValueError."""

    def fill_disk(self, instance_id: str) -> None:
        """Leave no free space on the node's disk. Raises ValueError."""

    def restore_disk(self, instance_id: str) -> None:
        """Undo `fill_disk`. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class HostBackend:
    """The hosts of this process and their network."""

    kind: str  # namespace, machine or process
    why: str  # why not namespaces, or ''
    network: str
    ssh_port: int
    caller: str | None  # the laptop's address as nodes see it; None if it is the caller's own
    hosts: Hosts
    router: Router | None
    listeners: tuple[socket.socket, ...]  # where the API listens as well
    held: tuple[socket.socket, ...] = ()  # to keep open while the server runs


def select(home: Path, kind: str, *, port: int, ssh_port: int, interfaces: tuple[str, ...]) -> HostBackend:
    """Prepare this process for hosts of a kind (auto, namespace, machine or process).

    Raises Unavailable, OSError.
    """
    if kind == "process":
        return _loopback(home, ssh_port, why="as requested")
    reason = (root_image.unavailable_reason() if kind == "machine" else "") or (
        lab_namespaces.unavailable_reason()
    )
    if not reason:
        return _lab(home, kind, port, interfaces)
    if kind in ("namespace", "machine"):
        raise Unavailable(f"{kind} nodes are not available here: {reason}")
    return _loopback(home, ssh_port, why=reason)


def _lab(home: Path, kind: str, port: int, interfaces: tuple[str, ...]) -> HostBackend:
    as_root = os.getuid() == 0
    lab_namespaces.enter()
    router = Router()
    router.set_up()
    addresses.use_network(_VPC, public=PUBLIC)
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    host_kind: HostKind = Machines(home) if kind == "machine" else Namespaces(home, as_root=as_root)
    return HostBackend(
        kind=host_kind.name,
        why="",
        network=_VPC,
        ssh_port=22,
        caller=LAPTOP,
        hosts=LabHosts(home, router, host_kind, interfaces=interfaces),
        router=router,
        listeners=(listener,),
    )


def _loopback(home: Path, ssh_port: int, *, why: str) -> HostBackend:
    from cloudddp.simulator.hosts.loopback import LoopbackHosts  # imports asyncssh

    guard, network, ssh_port = _reserve_network(ssh_port)
    addresses.use_network(network)
    return HostBackend(
        kind="process",
        why=why,
        network=network,
        ssh_port=ssh_port,
        caller=None,
        hosts=LoopbackHosts(home, ssh_port=ssh_port),
        router=None,
        listeners=(),
        held=(guard,),
    )


def _reserve_network(ssh_port: int) -> tuple[socket.socket, str, int]:
    """Return a /16 of loopback that no other simulator uses, reserved while the socket is open, and its SSH
    port.

    Raises Unavailable.
    """
    for number in range(64, 127):
        guard = _bind(f"127.{number}.0.1", _GUARD_PORT)
        if guard is None:
            continue
        for port in (ssh_port,) if ssh_port else _SSH_PORTS:
            if _can_listen(f"127.{number}.0.1", port):
                return guard, f"127.{number}.0.0/16", port
        guard.close()
        raise Unavailable(
            f"no port for SSH to the nodes: tried {ssh_port or ', '.join(map(str, _SSH_PORTS))}"
        )
    raise Unavailable("63 simulators are already running on this computer")


def _bind(host: str, port: int) -> socket.socket | None:
    """Bind the port without listening; without SO_REUSEADDR, with which two processes could bind it."""
    bound = socket.socket()
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        return None
    return bound


def _can_listen(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
