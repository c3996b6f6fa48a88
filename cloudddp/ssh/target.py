"""Where a node answers, which host keys it may present, and the route to it: directly, or by another
program."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cloudddp.config.timing import Timing
from cloudddp.errors import Command, ConnectError, Text
from cloudddp.ssh import node_socket
from cloudddp.ssh.node_socket import NodeSocket


class Stream(Protocol):
    """Like a socket, as paramiko.Transport uses one."""

    def send(self, data: bytes) -> int: ...

    def recv(self, size: int) -> bytes: ...

    def settimeout(self, seconds: float | None) -> None: ...

    def round_trip(self) -> float | None:
        """Return the round trip in seconds, None where it is not known."""

    def close(self) -> None: ...


class Route(Protocol):
    """How SSH reaches nodes. Several threads may open streams at the same time."""

    silent_hint: Text
    """What to check if a node does not answer."""

    def open(self, target: Target, timeout: float, limits: Timing) -> Stream:
        """Return a stream to the node's SSH server. Raises OSError; ConnectError if the route itself
        fails."""

    def explain(self, target: Target, stream: Stream | None) -> ConnectError | None:
        """Return why the stream ended before SSH was established, if the route is the cause."""

    def openssh_options(self, target: Target) -> list[str]:
        """Return the options that let OpenSSH take the same route, each as in `-o OPTION`."""


class Direct:
    """TCP from this computer to the node's address."""

    def __init__(self, silent_hint: Text = "") -> None:
        self.silent_hint: Text = silent_hint or (
            "check security group, route and your own network; if your address has changed: ",
            Command("allow-me"),
        )

    def open(self, target: Target, timeout: float, limits: Timing) -> NodeSocket:
        return node_socket.connect(target.host, target.port, timeout, limits.dead)

    def explain(self, _target: Target, _stream: Stream | None) -> None:
        """No other program takes part."""
        return

    def openssh_options(self, _target: Target) -> list[str]:
        return []


DIRECT = Direct()


def known_hosts_name(host: str, port: int) -> str:
    """Return the name of a server in a known_hosts file."""
    return host if port == 22 else f"[{host}]:{port}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a node answers, and the host keys that it may present, the likeliest first, each `ssh-ed25519
    AAAA...`.

    One key, or two while it is being replaced; with none, connecting is refused.
    """

    label: str
    host: str
    port: int
    user: str
    private_key: Path
    host_keys: tuple[str, ...]
    route: Route = field(default=DIRECT, compare=False)
    id: str = ""  # of its instance

    @property
    def known_as(self) -> str:
        """The node's name in a known_hosts file."""
        return known_hosts_name(self.host, self.port)

    @property
    def where(self) -> str:
        return f"{self.label} at {self.host} port {self.port}"

    def require_host_key(self) -> None:
        """Raise ConnectError if no host key is recorded that could verify the node."""
        if not self.host_keys:
            raise ConnectError(
                f"{self.label}: no host key is recorded for it, so it cannot be verified: refused",
                hint=(
                    "it has the cluster's tags, but this cluster's `up` did not start it: find out who did; ",
                    Command("down"),
                    " terminates it with the cluster",
                ),
            )
