"""The events of a job that is followed, and the bounded queue that has those of all nodes, with many writers
and one reader. `node` is a node rank.

A full queue blocks the threads that read from the nodes, so SSH's flow control slows them down.
"""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass

from cloudddp.agent.protocol.jobs import JobState
from cloudddp.errors import NodeError
from cloudddp.job.outcome import ExitedRank


@dataclass(frozen=True, slots=True)
class LogData:
    """A piece of one rank's log, split anywhere; as bytes, since lines may take twenty times as much memory.
    Rank LAUNCHER_RANK is torchrun's own output."""

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
    """A node is no longer followed although the job has not ended there. `since`: when it last responded, in
    seconds since the epoch. `error`: set if its replies are not the agent's."""

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
    """A bounded queue of events."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: queue.Queue[Event] = queue.Queue(capacity)
        self._closed = False

    def put(self, event: Event) -> None:
        """Append an event; wait while the queue is full. For any thread except the reader's."""
        is_last = False
        while not is_last:
            is_last = self._closed
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=0.0 if is_last else 1.0)
                return

    def get(self, timeout: float) -> Event | None:
        """Return the next event, or None if there is none within `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Drop what does not fit from now on: nobody may read it, and no thread must wait for that."""
        self._closed = True

    @property
    def backlogged(self) -> bool:
        """Whether the queue is more than half full: then heartbeats are late because of the reader."""
        return self._events.qsize() > self._events.maxsize // 2
