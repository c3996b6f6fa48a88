"""The events of a job that is followed. `node` is a node rank."""

from __future__ import annotations

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
class LogDropped:
    """A part of one rank's log does not exist any more: it was longer than its limit, and not read in
    time."""

    node: int
    rank: int
    size: int  # bytes


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
class NodeFinished:
    """The job has ended on a node, and all its logs there have been read."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeQuiet:
    """A node has sent no heartbeat for a while. Its connection may still recover."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeResponding:
    """A quiet node sends heartbeats again."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """The connection to a node has broken."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeReconnected:
    """A node is connected again."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """An attempt to connect to a node again has failed; there will be another one."""

    node: int


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
    | LogDropped
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
