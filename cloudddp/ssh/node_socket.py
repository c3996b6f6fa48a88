"""A TCP connection to a node, as paramiko.Transport uses a socket. Independent of SSH."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from typing import Any

TICK = 0.25  # seconds: a reader that waits is woken so often, to send keepalives
READ = 256 << 10  # bytes per read; paramiko asks for single packets
# Linux delays acknowledgements by 40 ms where it expects to send data with them, and sshd, which leaves
# Nagle's algorithm on for commands, waits for them: the first command of a connection took 50 ms instead of
# 10. The kernel resets this option.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
# Bytes after something was sent: a stream needs no acknowledgement of each packet, which costs both sides
# time.
QUICK = 64 << 10
_RTT_AT = 68  # where tcpi_rtt, in microseconds, is in struct tcp_info (linux/tcp.h)


class NodeSocket:
    """One thread receives, and one at a time sends."""

    def __init__(self, connection: socket.socket, dead: float) -> None:
        """`dead`: for how many seconds the other side may take no byte that is sent."""
        connection.settimeout(TICK)
        self._socket, self._dead = connection, dead
        self._is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        self._received, self._at = b"", 0
        self._quick = QUICK  # bytes to receive that are acknowledged at once
        self._blocked_since: float | None = None  # when the first of the sends was tried that took no byte
        self._closed = False  # paramiko reads it

    def settimeout(self, _seconds: float | None) -> None:
        """Every wait lasts for one tick at most."""

    def recv(self, size: int) -> bytes:
        """Return up to so many bytes, b"" at the end. Raises TimeoutError after a tick, OSError."""
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
        except TimeoutError as error:
            raise _lasting(error) from None
        if self._quick > 0 and QUICKACK is not None and self._is_tcp:
            self._quick -= len(data)
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        return data

    def send(self, data: bytes) -> int:
        """Return how many bytes were sent. Raises TimeoutError after a tick, OSError.

        paramiko repeats a send without limit: a node that takes nothing would hold its thread forever.
        """
        self._quick = QUICK
        try:
            count = self._socket.send(data)
        except TimeoutError as error:
            now = time.monotonic()
            self._blocked_since = self._blocked_since or now
            if now - self._blocked_since > self._dead:
                raise ConnectionAbortedError("it takes no more bytes") from None
            raise _lasting(error) from None
        self._blocked_since = None
        return count

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

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def getsockopt(self, level: int, option: int) -> int:
        return self._socket.getsockopt(level, option)


def _lasting(error: TimeoutError) -> OSError:
    """Return the error to raise: ETIMEDOUT, the end of a connection, is a TimeoutError too, and paramiko
    would go on."""
    return error if error.errno is None else ConnectionAbortedError(*error.args)


def connect(host: str, port: int, timeout: float, dead: float) -> NodeSocket:
    """Return a TCP connection. Raises OSError."""
    connection = socket.create_connection((host, port), timeout)
    # paramiko leaves Nagle's algorithm on: without it a command takes 2 ms instead of 44 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends the connection if keepalives are not acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead * 1000))
    return NodeSocket(connection, dead)
