"""Logins to a loopback node and file transfers, as sshd serves them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from cloudddp.simulator.hosts.loopback_ssh.channels import Channels
from cloudddp.simulator.hosts.loopback_ssh.sessions import Workspace, serve
from cloudddp.simulator.linux.socket_owner import SocketOwners

USER = "ubuntu"
_GREETING_SECONDS = 30.0


@dataclass(slots=True)
class NodeServer:
    """The SSH server of a node. Used by the event loop's thread only, except for `open`."""

    workspace: Workspace
    login_keys: frozenset[bytes]
    owners: SocketOwners
    listeners: list[Any] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    sessions: set[asyncio.Task[None]] = field(default_factory=set)
    open: bool = True
    nologin_until: float = 0.0  # of time.monotonic()

    async def listen(self, address: str, port: int, host_key: Any) -> None:
        """Return when SSH answers on the address. Raises OSError."""
        listener = await asyncssh.listen(
            address,
            port,
            server_factory=lambda: _Connection(self),
            server_host_keys=[host_key],
            process_factory=self._start_session,
            sftp_factory=lambda channel: _Sftp(channel, self.workspace.home),
            allow_scp=True,
            agent_forwarding=False,
            line_editor=False,
            encoding=None,
        )
        self.listeners.append(listener)
        async with asyncio.timeout(_GREETING_SECONDS):
            await _expect_greeting(address, port)

    def set_host_key(self, host_key: Any) -> None:
        """Use the key for new connections."""
        for listener in self.listeners:
            listener.update(server_host_keys=[host_key])

    def close_listeners(self, *, keep: str) -> None:
        """Stop listening on all addresses but one. Connections stay open."""
        kept = [one for one in self.listeners if one.get_addresses()[0][0] == keep]
        for listener in self.listeners:
            if listener not in kept:
                listener.close()
        self.listeners = kept

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for connection in list(self.connections):
            connection.abort()

    def _start_session(self, process: Any) -> None:
        # A separate task: asyncssh cancels its own when the connection is lost, and the command must
        # continue.
        task = asyncio.ensure_future(serve(process, self.workspace))
        self.sessions.add(task)
        task.add_done_callback(self.sessions.discard)


class _Connection(asyncssh.SSHServer):
    """Accepts `ubuntu` with a login key of the instance, if the connection comes from a process of our
    user."""

    def __init__(self, server: NodeServer) -> None:
        self._server = server
        self._connection: Any = None

    def connection_made(self, conn: Any) -> None:
        self._connection = conn
        conn._channels = Channels()
        self._server.connections.add(conn)
        peer, address = conn.get_extra_info("peername"), conn.get_extra_info("sockname")
        if not self._server.open or not self._server.owners.is_own(peer, server=address):
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncssh's signature)
        self._server.connections.discard(self._connection)

    def begin_auth(self, username: str) -> bool:  # noqa: ARG002
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: Any) -> bool:
        if time.monotonic() < self._server.nologin_until:
            # As sshd while PAM refuses the account (/run/nologin): it closes the connection within the
            # authentication.
            self._connection.abort()
            return False
        return username == USER and key.public_data in self._server.login_keys

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:  # noqa: ARG002
        # Port forwarding to the node is allowed; anywhere else would leave this computer.
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(dest_host).is_loopback
        return dest_host == "localhost"


class _Sftp(asyncssh.SFTPServer):
    """Relative paths start at the home, absolute ones are the computer's."""

    def __init__(self, channel: Any, home: Path) -> None:
        super().__init__(channel)
        self._home = os.fsencode(home)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._home, path)  # noqa: PTH118 (bytes)

    def exit(self) -> None:
        # Without an exit status, scp reports the whole copy as failed.
        self.channel.exit(0)


async def _expect_greeting(address: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(address, port)
    greeting = await reader.readline()
    writer.close()
    if not greeting.startswith(b"SSH-2.0-"):
        raise OSError(f"{address} port {port} does not speak SSH")
