"""Where a node answers, which host keys it may present, and the stream to its SSH server: over TCP, or by
another program (routes/). Independent of paramiko, which gets the stream from here.

Keys are ed25519, in OpenSSH's formats. `cryptography` is a dependency of paramiko; a pair takes 0.2 ms.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cloudddp.config.timing import Timing
from cloudddp.errors import ConnectError
from cloudddp.text import one_line

EARLY_CLOSE = "the server closed the connection before its SSH banner"
EARLY_CLOSE_HINT = (
    "sshd may refuse this address for a while (PerSourcePenalties, OpenSSH 9.8 and newer): something behind "
    "the same address probes port 22 or fails logins; wait some minutes (10 at most by default), or connect "
    "from another address"
)

KEY_KIND = "ssh-ed25519"
# RFC 8709: the key itself follows, 32 bytes.
KEY_HEADER = len(KEY_KIND).to_bytes(4, "big") + KEY_KIND.encode() + (32).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class KeyPair:
    private: str  # OpenSSH private key file, no passphrase
    public: str  # "ssh-ed25519 AAAA..."


def generate_key() -> KeyPair:
    """Return a new key pair."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())


def public_key_of(private: str) -> str:
    """Return the public key of a private one as `generate` returns it."""
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_ssh_private_key(private.encode(), password=None)
    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()


def public_key(text: str) -> str:
    """Return a public key as `ssh-ed25519 AAAA...`, without its comment. Raises ValueError for anything
    else."""
    parts = text.split(maxsplit=2)
    if len(text) > 1024 or len(text.splitlines()) != 1 or len(parts) < 2 or parts[0] != KEY_KIND:
        raise ValueError(f"not one line that begins with {KEY_KIND}")
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"not an {KEY_KIND} key") from None
    if not blob.startswith(KEY_HEADER) or len(blob) != len(KEY_HEADER) + 32:
        raise ValueError(f"not an {KEY_KIND} key")
    return f"{KEY_KIND} {base64.b64encode(blob).decode()}"


TICK = 0.25  # seconds: a reader that waits is woken so often, to send keepalives
READ = 256 << 10  # bytes per read; paramiko asks for single packets
# Linux delays acknowledgements by 40 ms where it expects to send data with them, and sshd, which leaves
# Nagle's algorithm on for commands, waits for them: the first command of a connection took 50 ms instead of
# 10. The kernel resets this option.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
# Bytes after something was sent: a stream needs no acknowledgement of each packet, which costs both sides
# time.
QUICK = 64 << 10
# Bytes at the beginning in which SSH's identification is looked for (RFC 4253, section 4.2).
_FIRST = 4096
_RTT_AT = 68  # where tcpi_rtt, in microseconds, is in struct tcp_info (linux/tcp.h)


class NodeSocket:
    """The stream to a node's SSH server, as paramiko.Transport uses one. One thread receives, and one at a
    time sends."""

    def __init__(self, connection: socket.socket, dead: float) -> None:
        """`dead`: for how many seconds the other side may take no byte that is sent."""
        connection.settimeout(TICK)
        self._socket, self._dead = connection, dead
        self._is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        self._received, self._at = b"", 0
        self._quick = QUICK  # bytes to receive that are acknowledged at once
        self._blocked_since: float | None = None  # when the first of the sends was tried that took no byte
        self._closed = False  # as of a socket: paramiko reads it
        self.first = b""  # of what was received
        self.has_ended = False  # by the other side

    def settimeout(self, _seconds: float | None) -> None:
        """Every wait lasts for one tick at most."""

    def recv(self, size: int) -> bytes:
        """Return up to so many bytes, b"" at the end. Raises TimeoutError after a tick without any;
        OSError."""
        if self._closed:
            return b""
        if self._at == len(self._received):
            self._received, self._at = self._read(), 0
        data = self._received[self._at : self._at + size]
        self._at += len(data)
        return data

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(READ)
        except OSError as error:
            raise self._lasting(error) from None
        self.has_ended = not (data or self._closed)
        self.first += data[: _FIRST - len(self.first)]
        if self._quick > 0 and QUICKACK is not None and self._is_tcp:
            self._quick -= len(data)
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        return data

    def send(self, data: bytes) -> int:
        """Return how many bytes were sent. Raises TimeoutError after a tick without any; OSError.

        paramiko repeats a send without limit: a node that takes nothing would hold its thread forever.
        """
        self._quick = QUICK
        try:
            count = self._socket.send(data)
        except OSError as error:
            now = time.monotonic()
            self._blocked_since = self._blocked_since or now
            if now - self._blocked_since > self._dead:
                raise ConnectionAbortedError("it takes no more bytes") from None
            raise self._lasting(error) from None
        self._blocked_since = None
        return count

    def _lasting(self, error: OSError) -> OSError:
        """Return the error to raise: ETIMEDOUT, the end of a connection, is a TimeoutError too, and paramiko
        would go on."""
        if isinstance(error, TimeoutError) and error.errno is None:
            return error
        self.has_ended = self.has_ended or not self._closed
        return ConnectionAbortedError(*error.args) if isinstance(error, TimeoutError) else error

    @property
    def speaks_ssh(self) -> bool:
        """Whether it has sent SSH's identification."""
        return b"SSH-" in self.first

    def greeting(self) -> str:
        """Return the first line that it has sent, quoted, or ''."""
        text = self.first.decode(errors="replace")
        return repr(one_line((text.strip() or text).splitlines()[0], 200)) if text else ""

    def round_trip(self) -> float | None:
        """Return TCP's estimate of the round trip in seconds, None where the system does not tell."""
        if not self._is_tcp or not sys.platform.startswith("linux"):
            return None
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
            return float(struct.unpack_from("=I", info, _RTT_AT)[0]) / 1e6
        return None

    def close(self) -> None:
        """Close it; a thread that receives is woken."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def open_socket(host: str, port: int, timeout: float, dead: float) -> NodeSocket:
    """Return a TCP connection. Raises OSError."""
    connection = socket.create_connection((host, port), timeout)
    # paramiko leaves Nagle's algorithm on: without it a command takes 2 ms instead of 44 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends the connection if keepalives are not acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead * 1000))
    return NodeSocket(connection, dead)


class Route(Protocol):
    """How SSH reaches nodes. Several threads may open streams at the same time."""

    silent_hint: str
    """What to check if a node does not answer."""

    def open(self, target: Target, timeout: float, limits: Timing) -> NodeSocket:
        """Return a stream to the node's SSH server. Raises OSError; ConnectError if the route itself
        fails."""

    def explain(self, target: Target, stream: NodeSocket) -> ConnectError | None:
        """Return why no SSH connection was established over a stream, if the route is the cause."""

    def openssh_options(self, target: Target) -> list[str]:
        """Return the options that let OpenSSH take the same route, each as in `-o OPTION`."""


class Direct:
    """TCP from this computer to the node's address."""

    def __init__(self, silent_hint: str = "") -> None:
        self.silent_hint = silent_hint or (
            "check security group, route and your own network; if your address has changed: `cloudddp "
            "allow-me`"
        )

    def open(self, target: Target, timeout: float, limits: Timing) -> NodeSocket:
        return open_socket(target.host, target.port, timeout, limits.dead)

    def explain(self, _target: Target, _stream: NodeSocket) -> None:
        """No other program takes part."""
        return

    def openssh_options(self, _target: Target) -> list[str]:
        return ["ProxyCommand=none", "ProxyJump=none"]  # also where the user has one for all hosts


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
                hint="it has the cluster's tags, but this cluster's `up` did not start it: find out who did; "
                "`cloudddp down` terminates it with the cluster",
            )
