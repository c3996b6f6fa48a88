"""The events of all nodes, in one bounded queue with many writers and one reader.

A full queue blocks the threads that read from the nodes, so SSH's flow control slows them down.

The reader is the main thread, where Ctrl-C may raise an exception between any two bytecodes. So reading does
not remove an event: the reader asks for an event by its number, as often as it likes, and acknowledges it by
asking for the next. A reader that keeps this number and its state in one attribute applies each event exactly
once. An interrupt leaves a SimpleQueue usable, since it is implemented in C; a `queue.Queue` could stay
locked.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque

from cloudddp.job.follow.events import Event

CAPACITY = 256  # events; a piece of a log is up to 64 KiB


class EventQueue:
    """A bounded queue of events, which are numbered from 0."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._events: deque[tuple[int, Event]] = deque()
        self._numbers = itertools.count()
        self._writers = threading.Lock()  # never taken by the reader
        self._closed = False
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()  # one token per free place
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the reader
        for _ in range(capacity):
            self._free.put(None)

    def put(self, event: Event) -> None:
        """Append an event; wait while the queue is full. For any thread except the reader's."""
        self._free.get()
        if self._closed:
            self._free.put(None)
            if len(self._events) >= self._capacity:
                return
        with self._writers:
            self._events.append((next(self._numbers), event))
        self._arrived.put(None)

    def get(self, number: int, timeout: float) -> Event | None:
        """Return the event of that number, or None if it does not arrive within `timeout` seconds.

        All events before it are dropped.
        """
        while self._events and self._events[0][0] < number:
            self._events.popleft()
            self._free.put(None)
            with contextlib.suppress(queue.Empty):
                self._arrived.get_nowait()
        if not self._events:
            with contextlib.suppress(queue.Empty):
                self._arrived.get(timeout=timeout)
        return self._events[0][1] if self._events else None

    def close(self) -> None:
        """Drop what does not fit from now on: nobody may read it, and the threads that read from the nodes
        must not wait for that."""
        self._closed = True
        self._free.put(None)

    @property
    def backlogged(self) -> bool:
        """Whether the queue is more than half full: then heartbeats are late because of the reader."""
        return len(self._events) > self._capacity // 2
