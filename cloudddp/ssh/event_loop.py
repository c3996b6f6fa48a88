"""One thread for the sockets and timers of all SSH connections.

paramiko reads each connection in a thread of its own, which wakes ten times a second: 64 nodes are 64 threads. Here the
same code runs in a greenlet per connection: where it would wait for its socket, it switches to the loop, which waits for
all sockets at once. Nothing in this thread may block.
"""

from __future__ import annotations

import atexit
import contextlib
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudddp.ssh.loop_socket import LoopSocket

TICK = 0.25  # seconds: a reader that waits is woken so often, to send keepalives and notice time limits


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


_starting = threading.Lock()
_loop: EventLoop | None = None


def event_loop() -> EventLoop:
    """Return the loop of this process, which is started when it is first needed."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = EventLoop()
        return _loop
