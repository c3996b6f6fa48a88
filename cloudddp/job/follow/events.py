"""The events of a job that is followed, and the bounded queue that has those of all nodes, with many writers
and one reader. `node` is a node rank.

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
from dataclasses import dataclass

from cloudddp.agent.protocol.jobs import JobState
from cloudddp.errors import NodeError
from cloudddp.job.outcome import ExitedRank


@dataclass(frozen=True, slots=True)
class LogData:
    """A piece of one rank's log, split anywhere. Rank LAUNCHER_RANK is torchrun's own output.

    It is queued as bytes, since the same data as lines may take twenty times as much memory.
    """

    node: int
    rank: int
    data: bytes


@dataclass(frozen=True, slots=True)
class BarsDue:
    """It is time to show the progress bars of all ranks: lines that are overwritten and not complete."""


@dataclass(frozen=True, slots=True)
class Silence:
    """No rank has written anything for a while."""

    seconds: float
    rank: int | None  # the last one that has written; None if none has
    progress: str  # of the training, as `step 120`; '' where it is not known
    exited: tuple[ExitedRank, ...] = ()  # ranks that have exited with code 0


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """The job's state on one node has changed."""

    node: int
    job: JobState


@dataclass(frozen=True, slots=True)
class _OfNode:
    """What has happened to a node."""

    node: int


class NodeFinished(_OfNode):
    """The job has ended on a node, and all its logs there have been read."""


class NodeQuiet(_OfNode):
    """A node has sent no heartbeat for a while. Its connection may still recover."""


class NodeResponding(_OfNode):
    """A quiet node sends heartbeats again."""


class NodeDisconnected(_OfNode):
    """The connection to a node has broken."""


class NodeReconnected(_OfNode):
    """A node was connected to again."""


class NodeUnreachable(_OfNode):
    """An attempt to connect to a node again has failed; there will be another one."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is no longer followed although the job has not ended there.

    `since` is when it last responded, in seconds since the epoch. `error` is set if the node itself is at
    fault, not the connection: its replies are not the agent's.
    """

    node: int
    reason: str
    since: float
    error: NodeError | None = None
    instance_ended: bool = False  # AWS reports that the instance has ended: nothing of the job runs there


@dataclass(frozen=True, slots=True)
class AwsAsked:
    """A query to AWS for ended instances is in progress."""


@dataclass(frozen=True, slots=True)
class AwsReport:
    """AWS's reply: the nodes whose instances have ended. Empty if AWS could not be queried."""

    ended: tuple[NodeLost, ...] = ()


Event = (
    LogData
    | BarsDue
    | Silence
    | JobUpdate
    | NodeFinished
    | NodeQuiet
    | NodeResponding
    | NodeDisconnected
    | NodeReconnected
    | NodeUnreachable
    | NodeLost
    | AwsAsked
    | AwsReport
)


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
