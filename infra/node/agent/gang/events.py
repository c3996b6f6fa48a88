"""Events and actions of a job on one node: the input and the output of step.step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional, Union

from cloudddp.agent.protocol.gang import Facts, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.jobs import Failure, Verdict

NONE_MISSING = Unreachable({}, ())


@dataclass(frozen=True)
class Moment:
    """When something happened: by the monotonic clock, and in seconds since the epoch."""

    at: float
    wall: float


# -- events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageReceived:
    """A message of another node."""

    node: int
    message: Message


@dataclass(frozen=True)
class ConnectionClosed:
    """Another node's agent has closed its connection, or has ended."""

    node: int


@dataclass(frozen=True)
class Tick:
    """Time has passed: one turn of the loop. `heard`: when each other node last sent something.
    `is_connected`: to every other node, in both directions; `missing`: the connections that this node never
    had."""

    heard: Mapping[int, float]
    is_connected: bool
    missing: Unreachable


@dataclass(frozen=True)
class FactsFound:
    """What this node is like is known."""

    facts: Facts


@dataclass(frozen=True)
class StopMarked:
    """The job's folder says that the job is to end here; `cancelled` by the user."""

    cancelled: bool


@dataclass(frozen=True)
class EndRequested:
    """A signal has asked the agent to end."""

    detail: str


@dataclass(frozen=True)
class Copied:
    """Every node has the files that the ranks continue from."""


@dataclass(frozen=True)
class CopyFailed:
    """This node cannot get the files that its ranks continue from."""

    detail: str


@dataclass(frozen=True)
class RanksChecked:
    """A look at the ranks of this node: whether a rank or a launcher has failed by itself, whether every
    launcher has ended, and whether every rank has exited with 0."""

    failed: bool = False
    ended: bool = False
    succeeded: bool = False


@dataclass(frozen=True)
class NoticeReceived:
    """This node is about to end; the ranks may save for `grace` seconds."""

    failure: Failure
    grace: float


@dataclass(frozen=True)
class Stalled:
    """No rank of any node does anything. Only the first node gets to know."""

    observed: Observed


@dataclass(frozen=True)
class RanksEnded:
    """No process of the ranks of this node is left."""

    report: Report


Event = Union[
    MessageReceived,
    ConnectionClosed,
    Tick,
    FactsFound,
    StopMarked,
    EndRequested,
    Copied,
    CopyFailed,
    RanksChecked,
    NoticeReceived,
    Stalled,
    RanksEnded,
]


# -- actions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send a message to all other nodes."""

    message: Message


@dataclass(frozen=True)
class SendHeartbeat:
    """Send a heartbeat now: it has news."""


@dataclass(frozen=True)
class Forward:
    """Give a message to what watches the ranks or copies files."""

    node: int
    message: Message


@dataclass(frozen=True)
class BeginAttempt:
    """Begin an attempt on this node: with the files that its ranks continue from."""


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks of this node."""


@dataclass(frozen=True)
class Restart:
    """Forget the last attempt, and log `note`. A BeginAttempt follows."""

    number: int
    note: str


@dataclass(frozen=True)
class RecordFailure:
    """Keep a failure of this node that is no rank's own end: its report will name it."""

    observed: Observed


@dataclass(frozen=True)
class EndRanks:
    """End the ranks of this node: SIGTERM, and SIGKILL after `grace` seconds. `saving`: they may need all of
    it. `cancelled`: by the user."""

    grace: float
    saving: bool = False
    cancelled: bool = False


@dataclass(frozen=True)
class AnnounceStop:
    """Mark in the job's folder that the ranks of all nodes end, and ask the other nodes to end theirs."""

    cancelled: bool
    token: str
    grace: Optional[float]


@dataclass(frozen=True)
class WaitForRanks:
    """Wait until no process of the ranks is left."""


@dataclass(frozen=True)
class Note:
    """Write into the logs of the ranks."""

    text: str


@dataclass(frozen=True)
class LeaveStall:
    """Keep, here and on the other nodes, that a stall is left alone."""

    detail: str


@dataclass(frozen=True)
class RecordUnreachable:
    """Keep why no rank is started, for the reply to `start`."""

    missing: Unreachable


@dataclass(frozen=True)
class End:
    """Record how the job has ended. Nothing follows."""

    verdict: Verdict


Action = Union[
    Send,
    SendHeartbeat,
    Forward,
    BeginAttempt,
    StartRanks,
    Restart,
    RecordFailure,
    EndRanks,
    AnnounceStop,
    WaitForRanks,
    Note,
    LeaveStall,
    RecordUnreachable,
    End,
]
