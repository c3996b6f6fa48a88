"""A socket whose reader is a greenlet of the event loop, and whose writers never wait."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudddp.ssh.event_loop import EventLoop

READ = 256 << 10  # bytes per read; paramiko asks for single packets
SLICE = 0.005  # seconds that one reader may work until all others have their turn
# Linux delays acknowledgements by 40 ms where it expects to send data with them, and sshd, which lets Nagle's algorithm on for
# commands, waits for them: the first command of a connection took 50 ms instead of 10. The kernel resets this option.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
_RTT_AT = 68  # where tcpi_rtt, in microseconds, is in struct tcp_info (linux/tcp.h)
# Bytes after something was sent: a stream needs no acknowledgement of each packet, which costs both sides time.
QUICK = 64 << 10


class LoopSocket:
    """A connected socket, as paramiko.Transport uses one. One greenlet receives; every thread may send, which never blocks:
    what the kernel does not take at once is kept (`backlog` bytes) and sent by the loop."""

    def __init__(self, connection: socket.socket, loop: EventLoop) -> None:
        connection.setblocking(False)
        self._socket, self.loop = connection, loop
        self._descriptor = connection.fileno()
        self._is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        self._received, self._at = b"", 0
        self._reader: Any = None  # the greenlet that waits in recv
        self._slice_ends = 0.0  # time.monotonic()
        self._error: OSError | None = None
        self._ended = False  # by the other side
        self._closed = False  # by this side; paramiko reads it
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._watches = False  # the loop waits until more can be sent
        self._on_sent: list[Callable[[], None]] = []
        self.backlog = 0
        self._quick = QUICK  # bytes to receive that are acknowledged at once
        loop.call_soon(self._register)

    def settimeout(self, _seconds: float | None) -> None:
        """Waits last until data arrives, or for one tick."""

    def recv(self, size: int) -> bytes:
        """Return up to so many bytes, b"" at the end. Raises TimeoutError after a tick without any; OSError."""
        if self._closed:
            return b""  # whatever has arrived: a flood must not outlive its connection
        if self._at < len(self._received):
            if time.monotonic() >= self._slice_ends:
                self._give_way()
        else:
            if not self._has_ended:
                import greenlet

                self._reader = greenlet.getcurrent()
                self.loop.wait()
                self._slice_ends = time.monotonic() + SLICE
            if self._at == len(self._received):
                # ETIMEDOUT is a TimeoutError, too, after which paramiko would read again.
                if self._error is not None and not isinstance(self._error, TimeoutError):
                    raise self._error
                if self._has_ended:
                    return b""
                raise TimeoutError
        data = self._received[self._at : self._at + size]
        self._at += len(data)
        return data

    def _give_way(self) -> None:
        """Let the loop serve every other connection once. One read may hold thousands of packets."""
        import greenlet

        self.loop.call_soon(greenlet.getcurrent().switch)
        self.loop.wait()
        self._slice_ends = time.monotonic() + SLICE

    def send(self, data: bytes) -> int:
        """Send all of it, now or later. Raises OSError."""
        with self._lock:
            if self._closed or self._error is not None:
                raise OSError(errno.EPIPE, "the connection has ended")
            self._quick = QUICK
            rest = data
            if not self._waiting:
                with contextlib.suppress(BlockingIOError):
                    rest = data[self._socket.send(data) :]
            if rest:
                self._waiting.append(rest)
                self.backlog += len(rest)
                if not self._watches:
                    self._watches = True
                    self.loop.call_soon(self._watch)
        return len(data)

    def round_trip(self) -> float | None:
        """Return TCP's estimate of the round trip in seconds, None where the system does not tell."""
        if not self._is_tcp or not sys.platform.startswith("linux"):
            return None
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
            return float(struct.unpack_from("=I", info, _RTT_AT)[0]) / 1e6
        return None

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call a function, once, as soon as nothing waits to be sent."""
        with self._lock:
            waits = bool(self._waiting)
            if waits and call not in self._on_sent:
                self._on_sent.append(call)
        if not waits:
            call()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.loop.call_soon(self._close)

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def getsockopt(self, level: int, option: int) -> int:
        return self._socket.getsockopt(level, option)

    def fileno(self) -> int:
        return self._descriptor

    # -- in the loop's thread --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Wake the reader, if it waits."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.switch()

    @property
    def _has_ended(self) -> bool:
        return self._ended or self._closed or self._error is not None

    def _register(self) -> None:
        if not self._closed:
            self.loop.register(self, self._descriptor, self._ready)

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._send_waiting()
        if mask & selectors.EVENT_READ and self._at == len(self._received):
            self._read()

    def _read(self) -> None:
        try:
            self._received, self._at = self._socket.recv(READ), 0
            if self._quick > 0 and QUICKACK is not None and self._is_tcp:
                self._quick -= len(self._received)
                self._socket.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
        else:
            if not self._received:
                self._ended = True
                self.loop.unregister(self, self._descriptor)
        self.tick()

    def _watch(self) -> None:
        if not self._has_ended:
            self.loop.watch(self._descriptor, self._ready, writes=True)
        else:
            self._forget_waiting()

    def _send_waiting(self) -> None:
        with self._lock:
            try:
                while self._waiting:
                    count = self._socket.send(self._waiting[0])
                    self.backlog -= count
                    if count < len(self._waiting[0]):
                        self._waiting[0] = self._waiting[0][count:]
                    else:
                        self._waiting.popleft()
            except BlockingIOError:
                return
            except OSError as error:
                self._error = self._error or error
            self._watches = False
        if self._error is not None:
            self._fail(self._error)
            self.tick()
            return
        self.loop.watch(self._descriptor, self._ready, writes=False)
        self._call_waiters()

    def _fail(self, error: OSError) -> None:
        self._error = self._error or error
        self.loop.unregister(self, self._descriptor)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        with self._lock:
            self._waiting.clear()
            self.backlog = 0
        self._call_waiters()

    def _call_waiters(self) -> None:
        with self._lock:
            calls, self._on_sent = self._on_sent, []
        for call in calls:
            call()

    def _close(self) -> None:
        self.loop.unregister(self, self._descriptor)
        self._forget_waiting()
        self._socket.close()
        self.tick()
