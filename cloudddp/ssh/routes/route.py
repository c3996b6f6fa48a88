"""What every route provides, and the direct one."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Protocol

from cloudddp.config.timing import Timing
from cloudddp.errors import Command, ConnectError, Text

if TYPE_CHECKING:
    from cloudddp.ssh.connection import Target

Stream = Any
"""Like a socket, as paramiko.Transport uses one: send, recv, settimeout and close."""


class Route(Protocol):
    """How SSH reaches nodes. Several threads may open streams at the same time."""

    silent_hint: Text
    """What to check if a node does not answer."""

    def open(self, target: Target, timeout: float, limits: Timing) -> Stream:
        """Return a stream to the node's SSH server. Raises OSError; ConnectError if the route itself fails."""

    def explain(self, target: Target, stream: Stream | None) -> ConnectError | None:
        """Return why the stream ended before SSH was established, if the route is the cause."""

    def openssh_options(self, target: Target) -> list[str]:
        """Return the options that let OpenSSH take the same route, each as in `-o OPTION`."""

    def retain(self) -> None:
        """Count one more user, who will call `close`: fleets may share a route."""

    def close(self) -> None:
        """End one use. With the last one, what the streams share is closed, and opening a stream raises ConnectError."""


class Direct:
    """TCP from this computer to the node's address."""

    def __init__(self, silent_hint: Text = "") -> None:
        self.silent_hint: Text = silent_hint or (
            "check security group, route and your own network; if your address has changed: ",
            Command("allow-me"),
        )

    def open(self, target: Target, timeout: float, limits: Timing) -> socket.socket:
        return tcp(target.host, target.port, timeout, limits)

    def explain(self, _target: Target, _stream: Stream | None) -> None:
        """No other program takes part."""
        return

    def openssh_options(self, _target: Target) -> list[str]:
        return []

    def retain(self) -> None:
        """Nothing is shared."""

    def close(self) -> None:
        """Nothing is shared."""


def tcp(host: str, port: int, timeout: float, limits: Timing) -> socket.socket:
    """Return a TCP connection. Raises OSError."""
    connection = socket.create_connection((host, port), timeout)
    # paramiko leaves Nagle's algorithm on: without it a command takes 2 ms instead of 44 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends the connection if keepalives are not acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.dead * 1000))
    return connection


DIRECT = Direct()
