"""One thread for the sockets and timers of all SSH connections.

paramiko reads each connection in a thread of its own, which wakes ten times a second: 64 nodes are 64 threads. Here the same code
runs in a greenlet per connection: where it would wait for its socket, it switches to the loop, which waits for all sockets
at once. Nothing in this thread may block.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import heapq
import itertools
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

TICK = 0.25  # seconds: a reader that waits is woken so often, to send keepalives and notice time limits
READ = 256 << 10  # bytes per read; paramiko asks for single packets
# Linux delays acknowledgements by 40 ms where it expects to send data with them, and sshd, which lets Nagle's algorithm on for
# commands, waits for them: the first command of a connection took 50 ms instead of 10. The kernel resets this option.
QUICKACK = getattr(socket, "TCP_QUICKACK", None)


class Timer:
    """A call that is due later, unless it is cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class EventLoop:
    """A daemon thread. `call_soon` and `call_later` may be used by every thread; the calls must not block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        for one in (self._waker, self._wakes):
            one.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda _mask: self._drain())
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._readers: set[LoopSocket] = set()
        self._main: Any = None  # the greenlet that waits for all sockets
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="ssh connections")
        self._thread.start()
        self.ident = self._thread.ident
        # Python ends daemon threads where they are: in a greenlet, whose stack is not the thread's, that is a crash.
        atexit.register(self._stop)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the loop's thread."""
        return threading.get_ident() == self.ident

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        self._wake()
        return timer

    def spawn(self, run: Callable[[], None]) -> None:
        """Run a function in a greenlet of this thread: it may wait only by LoopSocket.recv."""
        import greenlet  # with paramiko, not at the start of every command

        self.call_soon(lambda: greenlet.greenlet(run, parent=self._main).switch())

    # -- in the loop's thread --------------------------------------------------------------------------------------

    def register(self, reader: LoopSocket, descriptor: int, call: Callable[[int], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, call)
        self._readers.add(reader)

    def watch(self, descriptor: int, call: Callable[[int], None], *, writes: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        self._selector.modify(descriptor, events, call)

    def unregister(self, reader: LoopSocket, descriptor: int) -> None:
        self._readers.discard(reader)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(descriptor)

    def wait(self) -> None:
        """Switch from a greenlet to the loop, until something switches back."""
        self._main.switch()

    def _run(self) -> None:
        import greenlet

        self._main = greenlet.getcurrent()
        ticked = time.monotonic()
        while not self._is_stopped:
            for key, mask in self._selector.select(self._seconds(ticked)):
                _guarded(functools.partial(key.data, mask))
            for _ in range(len(self._calls)):
                _guarded(self._calls.popleft())
            now = time.monotonic()
            for timer in self._due(now):
                if timer.call is not None:
                    _guarded(timer.call)
            if now - ticked >= TICK:
                ticked = now
                for reader in list(self._readers):
                    _guarded(reader.tick)

    def _stop(self) -> None:
        """End the thread. It serves nobody any more, and never blocks: this is a matter of milliseconds."""
        self._is_stopped = True
        self._wake()
        self._thread.join()

    def _seconds(self, ticked: float) -> float | None:
        """Return how long to wait for sockets."""
        if self._calls:
            return 0
        due = [ticked + TICK] if self._readers else []
        with self._lock:
            due += [self._timers[0][0]] if self._timers else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _due(self, now: float) -> list[Timer]:
        found = []
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                found.append(heapq.heappop(self._timers)[2])
        return found

    def _wake(self) -> None:
        if not self.is_current:
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"\0")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)


def _guarded(call: Callable[[], None]) -> None:
    """Call a function. An error in it must not end the other connections."""
    try:
        call()
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


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
        self._error: OSError | None = None
        self._ended = False  # by the other side
        self._closed = False  # by this side; paramiko reads it
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._watches = False  # the loop waits until more can be sent
        self._on_sent: list[Callable[[], None]] = []
        self.backlog = 0
        loop.call_soon(self._register)

    def settimeout(self, _seconds: float | None) -> None:
        """Waits last until data arrives, or for one tick."""

    def recv(self, size: int) -> bytes:
        """Return up to so many bytes, b"" at the end. Raises TimeoutError after a tick without any; OSError."""
        if self._at == len(self._received):
            if not self._has_ended:
                import greenlet

                self._reader = greenlet.getcurrent()
                self.loop.wait()
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

    def send(self, data: bytes) -> int:
        """Send all of it, now or later. Raises OSError."""
        with self._lock:
            if self._closed or self._error is not None:
                raise OSError(errno.EPIPE, "the connection has ended")
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

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call a function, once, as soon as nothing waits to be sent."""
        with self._lock:
            waits = bool(self._waiting)
            if waits:
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
            if QUICKACK is not None and self._is_tcp:
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


_starting = threading.Lock()
_loop: EventLoop | None = None


def event_loop() -> EventLoop:
    """Return the loop of this process, which is started when it is first needed."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = EventLoop()
        return _loop
