"""Events and actions of a job on one node: the input and the output of step.step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Union

from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Facts, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.jobs import Failure, Verdict

NONE_MISSING = Unreachable({}, ())


@frozen
class Moment:
    """When something happened: by the monotonic clock, and in seconds since the epoch."""

    at: float
    wall: float


# -- events --------------------------------------------------------------------------------------------------


@frozen
class MessageReceived:
    """A message of another node."""

    node: int
    message: Message


@frozen
class ConnectionClosed:
    """Another node's agent has closed its connection, or has ended."""

    node: int


@frozen
class Tick:
    """Time has passed: one turn of the loop. `heard`: when each other node last sent something.
    `is_connected`: to every other node, in both directions; `missing`: the connections that this node never
    had."""

    heard: Mapping[int, float]
    is_connected: bool
    missing: Unreachable


@frozen
class FactsFound:
    """What this node is like is known."""

    facts: Facts


@frozen
class StopMarked:
    """The job's folder says that the job is to end here; `cancelled` by the user."""

    cancelled: bool


@frozen
class EndRequested:
    """A signal has asked the agent to end."""

    detail: str


@frozen
class Copied:
    """Every node has the files that the ranks continue from."""


@frozen
class CopyFailed:
    """This node cannot get the files that its ranks continue from."""

    detail: str


@frozen
class RanksChecked:
    """A look at the ranks of this node: whether a rank or a launcher has failed by itself, whether every
    launcher has ended, and whether every rank has exited with 0."""

    failed: bool = False
    ended: bool = False
    succeeded: bool = False


@frozen
class NoticeReceived:
    """This node is about to end; the ranks may save for `grace` seconds."""

    failure: Failure
    grace: float


@frozen
class Stalled:
    """No rank of any node does anything. Only the first node gets to know."""

    observed: Observed


@frozen
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


@frozen
class Send:
    """Send a message to all other nodes."""

    message: Message


@frozen
class SendHeartbeat:
    """Send a heartbeat now: it has news."""


@frozen
class Forward:
    """Give a message to what watches the ranks or copies files."""

    node: int
    message: Message


@frozen
class BeginAttempt:
    """Begin an attempt on this node: with the files that its ranks continue from."""


@frozen
class StartRanks:
    """Start the ranks of this node."""


@frozen
class Restart:
    """Forget the last attempt, and log `note`. A BeginAttempt follows."""

    number: int
    note: str


@frozen
class RecordFailure:
    """Keep a failure of this node that is no rank's own end: its report will name it."""

    observed: Observed


@frozen
class EndRanks:
    """End the ranks of this node: SIGTERM, and SIGKILL after `grace` seconds. `saving`: they may need all of
    it. `cancelled`: by the user."""

    grace: float
    saving: bool = False
    cancelled: bool = False


@frozen
class AnnounceStop:
    """Mark in the job's folder that the ranks of all nodes end, and ask the other nodes to end theirs."""

    cancelled: bool
    token: str
    grace: Optional[float]


@frozen
class WaitForRanks:
    """Wait until no process of the ranks is left."""


@frozen
class Note:
    """Write into the logs of the ranks."""

    text: str


@frozen
class LeaveStall:
    """Keep, here and on the other nodes, that a stall is left alone."""

    detail: str


@frozen
class RecordUnreachable:
    """Keep why no rank is started, for the reply to `start`."""

    missing: Unreachable


@frozen
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
