"""Loopback nodes: one SSH server per instance on addresses of 127.0.0.0/8, all in the simulator's own
process.

Needs no root, and nothing but Python packages. Every node has its own home and host key, and marks the
processes that it starts; it shares the computer's processes, files and network with the user, so it executes
nothing of user data.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from cloudddp.simulator.guest import log, python_startup
from cloudddp.simulator.hosts import node_folder, python_environment
from cloudddp.simulator.hosts.loopback_ssh import host_keys, stubs
from cloudddp.simulator.hosts.loopback_ssh.server import USER, NodeServer
from cloudddp.simulator.hosts.loopback_ssh.sessions import Workspace
from cloudddp.simulator.hosts.node_spec import NodeSpec
from cloudddp.simulator.linux import processes
from cloudddp.simulator.linux.socket_owner import SocketOwners

_T = TypeVar("_T")


@dataclass(slots=True)
class _Node:
    """A node that is up. `public_ip`: the public address on which it answers now."""

    spec: NodeSpec
    server: NodeServer
    reload_pipe: int
    public_ip: str | None


class LoopbackHosts:
    """Implements host_backend.Hosts on any Linux."""

    runs_timers = False  # user data is not executed

    def __init__(self, home: Path, *, ssh_port: int) -> None:
        self.on_end: Callable[[str, str], None] = lambda _id, _ending: None
        self._home = home
        self._port = ssh_port
        self._owners = SocketOwners()
        self._nodes: dict[str, _Node] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True).start()

    def boot(self, spec: NodeSpec) -> None:
        """Return when SSH answers on the private and on the public address. Raises OSError, ValueError."""
        folder = self._folder(spec.instance_id)
        host_key = self._host_key(spec)
        _create_files(folder, spec)
        server = NodeServer(
            workspace=Workspace(folder / "home", self._environment(spec.instance_id), lambda: server.open),
            login_keys=frozenset(filter(None, map(host_keys.public_data, spec.login_keys))),
            owners=self._owners,
            nologin_until=time.monotonic() + spec.boot.nologin_seconds,
        )
        node = _Node(spec, server, host_keys.open_reload_pipe(folder), spec.public_ip)
        self._nodes[spec.instance_id] = node
        try:
            self._run(self._listen(node, host_key))
        except BaseException:
            self.halt(spec.instance_id)
            raise

    def halt(self, instance_id: str) -> None:
        """End every process of the node and its SSH server, and keep its files. Raises TimeoutError."""
        if node := self._nodes.pop(instance_id, None):
            node.server.open = False
            self._run(self._close(node))
        processes.kill(self._home, instance_id)

    def remove(self, instance_id: str) -> None:
        """As `halt`, and remove its files."""
        self.halt(instance_id)
        node_folder.remove(self._folder(instance_id))

    def set_public_address(self, instance_id: str, address: str | None) -> None:
        """Answer SSH on another public address, or none: an Elastic IP was associated. Raises OSError."""
        node = self._nodes.get(instance_id)
        if node is None or node.public_ip == address:
            return
        node.public_ip = address
        self._run(self._move(node, address))

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """Return ssh_port, home (a path) and processes (pids) of each node."""
        pids = processes.by_node(self._home)
        return [
            {
                "ssh_port": self._port,
                "home": str(self._folder(instance_id) / "home"),
                "processes": pids.get(instance_id, []),
            }
            for instance_id in instance_ids
        ]

    def moved_deadline(self, instance_id: str) -> datetime | None:
        with contextlib.suppress(OSError, ValueError):
            text = (self._folder(instance_id) / "run" / "deadline").read_text()
            return datetime.strptime(text, "%a %Y-%m-%d %H:%M:%S UTC\n").replace(tzinfo=UTC)
        return None

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, instance_id: str) -> None:
        self.halt(instance_id)
        self.on_end(instance_id, "crash")

    def freeze(self, instance_id: str) -> None:
        """Stop the node's processes. Its SSH server is part of the simulator and still accepts
        connections."""
        processes.stop(self._home, instance_id)

    def thaw(self, instance_id: str) -> None:
        processes.resume(self._home, instance_id)

    def fill_disk(self, instance_id: str) -> None:
        raise ValueError(f"{instance_id} has no disk of its own")

    def restore_disk(self, instance_id: str) -> None:
        raise ValueError(f"{instance_id} has no disk of its own")

    # -- the event loop ------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self, node: _Node, host_key: Any) -> None:
        self._loop.add_reader(node.reload_pipe, self._reload_host_key, node)
        for address in filter(None, (node.spec.private_ip, node.spec.public_ip)):
            if not ipaddress.ip_address(address).is_loopback:
                raise OSError(f"a loopback node cannot have the address {address}; use the default VPC")
            await node.server.listen(address, self._port, host_key)

    async def _move(self, node: _Node, address: str | None) -> None:
        node.server.close_listeners(keep=node.spec.private_ip)
        if address:
            await node.server.listen(address, self._port, self._host_key(node.spec))

    def _reload_host_key(self, node: _Node) -> None:
        """As sshd does at SIGHUP: new connections get the current host key."""
        os.read(node.reload_pipe, 1 << 10)
        try:
            node.server.set_host_key(self._host_key(node.spec))
        except (OSError, ValueError) as error:
            log.write(f"{node.spec.instance_id}: {error}")

    async def _close(self, node: _Node) -> None:
        self._loop.remove_reader(node.reload_pipe)
        os.close(node.reload_pipe)
        node.server.close()

    # -- files ---------------------------------------------------------------------------------------------

    def _host_key(self, spec: NodeSpec) -> Any:
        return host_keys.load(self._folder(spec.instance_id), spec.user_data.host_key)

    def _folder(self, instance_id: str) -> Path:
        return node_folder.nodes_folder(self._home) / instance_id

    def _environment(self, instance_id: str) -> dict[str, str]:
        folder = self._folder(instance_id)
        path = (
            folder / "bin",
            folder / "venv/bin",
            Path(sys.executable).parent,
            "/usr/local/bin",
            "/usr/bin",
            "/bin",
        )
        return {
            "HOME": str(folder / "home"),
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "TMPDIR": str(node_folder.temporary_folder(folder)),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(folder / "python"),
            "PATH": os.pathsep.join(map(str, path)),
            processes.HOME_MARK: str(self._home),
            processes.NODE_MARK: instance_id,
            # there is no metadata service: 169.254.169.254 is that of this computer, if any
            "CLOUDDDP_METADATA": "",
        }


def _create_files(folder: Path, spec: NodeSpec) -> None:
    for name in ("home", "bin", "python", "tmp", "run"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    scripts = stubs.scripts(
        gpus=tuple(name for name, _ in spec.gpus),
        efa_devices=spec.efa_devices,
        user_data=spec.user_data,
        address=spec.private_ip,
        failed_gpus=spec.boot.failed_gpus,
        nfs=not spec.boot.no_nfs,
    )
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    shutil.copy(Path(python_startup.__file__), folder / "python" / "sitecustomize.py")
    spec.write_facts(folder / "python")
    venv, prefixes = folder / "venv", (Path(sys.prefix), Path(sys.base_prefix))
    python_environment.create(venv, venv, prefix=prefixes[0], base_prefix=prefixes[1])
