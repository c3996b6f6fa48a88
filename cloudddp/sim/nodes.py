"""Loopback nodes: one SSH server per instance, on addresses of 127.0.0.0/8, all in the server's own process.

Needs no root and nothing but pip. Every node has its own home and host key, and marks whatever it starts; it
shares the machine's processes, files and network with its user, so nothing of the user data is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from cloudddp.sim import control, processes, shims
from cloudddp.sim.channels import Channels
from cloudddp.sim.nodespec import NodeSpec
from cloudddp.sim.peers import Network
from cloudddp.sim.sessions import Place, serve

USER = "ubuntu"

_T = TypeVar("_T")
_BOOT_SECONDS = 30.0
_SOCKET_PATH = 60  # a Unix socket's path holds 107 bytes, and programs append some 40 to TMPDIR


@dataclass(slots=True)
class _Node:
    """A node that is up. Touched by the event loop's thread only, but for `open`."""

    spec: NodeSpec
    place: Place
    logins: frozenset[bytes]
    network: Network
    reloading: int  # our end of the pipe by which `sudo` on the node has its server read the host key again
    listeners: list[Any] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    sessions: set[asyncio.Task[None]] = field(default_factory=set)
    open: bool = True


class LoopbackNodes:
    """The node backend that works everywhere on Linux; implements nodespec.Nodes."""

    keeps_time = False  # user data is read, never run: the simulator watches the deadlines

    def __init__(self, home: Path, *, ssh_port: int) -> None:
        self.on_end: Callable[[str, str], None] = lambda _id, _how: None
        self._home = home
        self._port = ssh_port
        self._network = Network()
        self._nodes: dict[str, _Node] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True).start()

    def boot(self, spec: NodeSpec) -> None:
        """Return when SSH answers on the private and on the public address. Raises OSError, ValueError."""
        folder = self._folder(spec.instance_id)
        key = _host_key(folder, spec)
        _furnish(folder, spec)
        node = _Node(
            spec=spec,
            place=Place(folder / "home", self._environment(spec.instance_id), lambda: node.open),
            logins=frozenset(filter(None, map(_public_data, spec.login_keys))),
            network=self._network,
            reloading=_reload_pipe(folder),
        )
        self._nodes[spec.instance_id] = node
        try:
            self._do(self._listen(node, key))
        except BaseException:
            self.halt(spec.instance_id)
            raise

    def halt(self, instance_id: str) -> None:
        """End every process of the node and stop answering; its files stay. Raises TimeoutError."""
        if node := self._nodes.pop(instance_id, None):
            node.open = False
            self._do(self._hang_up(node))
        processes.end(self._home, instance_id)

    def remove(self, instance_id: str) -> None:
        """As `halt`, and its files go too."""
        self.halt(instance_id)
        control.remove_node(self._folder(instance_id))

    def kill(self, instance_id: str) -> None:
        """As if the machine under it had failed."""
        self.halt(instance_id)
        self.on_end(instance_id, "crash")

    def freeze(self, instance_id: str) -> None:
        """Stop what runs on the node. Its SSH server is the simulator's own, and goes on answering."""
        processes.stop(self._home, instance_id)

    def thaw(self, instance_id: str) -> None:
        processes.resume(self._home, instance_id)

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """For each: ssh_port, home (a path), processes (pids)."""
        pids = processes.by_node(self._home)
        return [
            {
                "ssh_port": self._port,
                "home": str(self._folder(instance_id) / "home"),
                "processes": pids.get(instance_id, []),
            }
            for instance_id in instance_ids
        ]

    def _do(self, what: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def _folder(self, instance_id: str) -> Path:
        return self._home / "sim" / "nodes" / instance_id

    def _environment(self, instance_id: str) -> dict[str, str]:
        folder = self._folder(instance_id)
        path = (folder / "bin", Path(sys.executable).parent, "/usr/local/bin", "/usr/bin", "/bin")
        return {
            "HOME": str(folder / "home"),
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "TMPDIR": str(_temporary(folder)),
            "LANG": "C.UTF-8",
            # `pip install` in a rehearsal goes into the node's own home, not into whoever runs the simulator.
            "PIP_TARGET": str(folder / "home" / "site-packages"),
            "PYTHONPATH": str(folder / "home" / "site-packages"),
            "PATH": os.pathsep.join(map(str, path)),
            processes.HOME_MARK: str(self._home),
            processes.NODE_MARK: instance_id,
        }

    async def _listen(self, node: _Node, key: Any) -> None:
        for address in filter(None, (node.spec.private_ip, node.spec.public_ip)):
            if not ipaddress.ip_address(address).is_loopback:
                raise OSError(f"a loopback node cannot have the address {address}; use the default VPC")
            listener = await asyncssh.listen(
                address,
                self._port,
                server_factory=lambda: _Door(node),
                server_host_keys=[key],
                process_factory=lambda process: _begin(node, process),
                sftp_factory=lambda channel: _Files(channel, node.place.home),
                allow_scp=True,
                agent_forwarding=False,
                line_editor=False,
                encoding=None,
            )
            node.listeners.append(listener)
            self._loop.add_reader(node.reloading, self._reload, node)
            async with asyncio.timeout(_BOOT_SECONDS):
                await _greeted(address, self._port)

    def _reload(self, node: _Node) -> None:
        """As sshd does at SIGHUP: new connections are shown the host key that is there now."""
        os.read(node.reloading, 1 << 10)
        try:
            key = _host_key(self._folder(node.spec.instance_id), node.spec)
        except (OSError, ValueError) as error:
            print(f"{node.spec.instance_id}: {error}", file=sys.stderr, flush=True)
            return
        for listener in node.listeners:
            listener.update(server_host_keys=[key])

    async def _hang_up(self, node: _Node) -> None:
        self._loop.remove_reader(node.reloading)
        os.close(node.reloading)
        for listener in node.listeners:
            listener.close()
        for connection in list(node.connections):
            connection.abort()


class _Door(asyncssh.SSHServer):
    """Who may come in: `ubuntu`, with a key of the instance."""

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._connection: Any = None

    def connection_made(self, conn: Any) -> None:
        self._connection = conn
        conn._channels = Channels()
        self._node.connections.add(conn)
        peer, door = conn.get_extra_info("peername"), conn.get_extra_info("sockname")
        if not self._node.open or not self._node.network.is_ours(peer, door=door):
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncssh's signature)
        self._node.connections.discard(self._connection)

    def begin_auth(self, username: str) -> bool:  # noqa: ARG002
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: Any) -> bool:
        return username == USER and key.public_data in self._node.logins

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:  # noqa: ARG002
        # A tunnel to a port of the node is fine; one to anywhere else would leave the machine.
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(dest_host).is_loopback
        return dest_host == "localhost"


class _Files(asyncssh.SFTPServer):
    """SFTP as sshd serves it: relative paths start at the home, absolute ones are the machine's."""

    def __init__(self, channel: Any, home: Path) -> None:
        super().__init__(channel)
        self._start = os.fsencode(home)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._start, path)  # noqa: PTH118 (bytes)

    def exit(self) -> None:
        # scp takes the lack of an exit status for a failure of the whole copy.
        self.channel.exit(0)


def _begin(node: _Node, process: Any) -> None:
    # A task of our own: asyncssh cancels its own when the connection goes, and the command has to go on.
    task = asyncio.ensure_future(serve(process, node.place))
    node.sessions.add(task)
    task.add_done_callback(node.sessions.discard)


async def _greeted(address: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(address, port)
    greeting = await reader.readline()
    writer.close()
    if not greeting.startswith(b"SSH-2.0-"):
        raise OSError(f"{address} port {port} answers, but not with SSH")


def _furnish(folder: Path, spec: NodeSpec) -> None:
    for name in ("home", "bin", "tmp", "run"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in shims.scripts(
        gpus=tuple(name for name, _ in spec.gpus), user_data=spec.user_data
    ).items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)


def _temporary(folder: Path) -> Path:
    """The node's temporary folder, by a name short enough for the Unix sockets that programs put there."""
    target = folder / "tmp"
    if len(os.fsencode(target)) <= _SOCKET_PATH:
        return target
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()
    short = Path(tempfile.gettempdir()) / f"cloudddp-{digest[:12]}"
    with contextlib.suppress(FileExistsError):
        short.symlink_to(target)
    if not short.is_symlink() or short.readlink() != target or short.lstat().st_uid != os.getuid():
        return target
    (folder / "run" / "tmp-link").write_text(str(short))
    return short


def _host_key(folder: Path, spec: NodeSpec) -> Any:
    """The key that the node shows: at its first boot the one that the user data injects, or one of its own. It is
    kept, as cloud-init keeps it, over reboots and stops. Raises ValueError.

    A second key is stored beside it for `sudo` to install: it is made here, since a node has no ssh-keygen.
    """
    run = folder / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    used = run / "host_key"
    if not used.exists():
        for name, text in (("fresh_host_key", ""), ("host_key", spec.user_data.host_key)):
            key = _import(text) if text else asyncssh.generate_private_key("ssh-ed25519")
            for path, data in (
                (run / f"{name}.pub", key.export_public_key()),
                (run / name, key.export_private_key()),
            ):
                path.touch(mode=0o600)
                path.write_bytes(data)
    return _import(used.read_text())


def _reload_pipe(folder: Path) -> int:
    pipe = folder / "run" / "reload"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    # Open for writing too: otherwise it is at EOF after each writer.
    return os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def _import(text: str) -> Any:
    try:
        return asyncssh.import_private_key(text)
    except asyncssh.KeyImportError as error:
        raise ValueError(f"the host key cannot be read: {error}") from error


def _public_data(line: str) -> bytes | None:
    try:
        return bytes(asyncssh.import_public_key(line).public_data)
    except asyncssh.KeyImportError:
        return None
