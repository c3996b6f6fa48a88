"""Events and actions of a job on one node: the input and the output of step.step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import NodeFacts, Observed, PeerMessage, Report, Unreachable
from cloudddp.agent.protocol.jobs import Failure, Verdict

NONE_MISSING = Unreachable({}, ())


@frozen
class Moment:
    """When something happened: by the monotonic clock, and in seconds since the epoch."""

    at: float
    wall: float


# -- events --------------------------------------------------------------------------------------------------


class Event:
    """What has happened on a node."""


@frozen
class MessageReceived(Event):
    """A message of another node."""

    node: int
    message: PeerMessage


@frozen
class ConnectionClosed(Event):
    """Another node's agent has closed its connection, or has ended."""

    node: int


@frozen
class Tick(Event):
    """Time has passed: one turn of the loop. `heard`: when each other node last sent something.
    `is_connected`: to every other node, in both directions; `missing`: the connections that this node never
    had."""

    heard: Mapping[int, float]
    is_connected: bool
    missing: Unreachable


@frozen
class FactsFound(Event):
    """What this node is like is known."""

    facts: NodeFacts


@frozen
class StopMarked(Event):
    """The job's folder says that the job is to end here; `cancelled` by the user."""

    cancelled: bool


@frozen
class EndRequested(Event):
    """A signal has asked the agent to end."""

    detail: str


@frozen
class Copied(Event):
    """Every node has the files that the ranks continue from."""


@frozen
class RanksChecked(Event):
    """A look at the ranks of this node: whether a rank or a launcher has failed by itself, whether every
    launcher has ended, and whether every rank has exited with 0."""

    failed: bool = False
    ended: bool = False
    succeeded: bool = False


@frozen
class FailureNoticed(Event):
    """A failure that is no rank's own end: files were not copied; or this node ends, with `grace` to save."""

    failure: Failure
    grace: Optional[float] = None


@frozen
class Stalled(Event):
    """No rank of any node does anything. Only the first node gets to know."""

    observed: Observed


@frozen
class RanksEnded(Event):
    """No process of the ranks of this node is left."""

    report: Report


# -- actions -------------------------------------------------------------------------------------------------


class Action:
    """What a node does because of an event."""


@frozen
class Send(Action):
    """Send a message to all other nodes."""

    message: PeerMessage


@frozen
class SendHeartbeat(Action):
    """Send a heartbeat now: it has news."""


@frozen
class Forward(Action):
    """Give a message to what watches the ranks or copies files."""

    node: int
    message: PeerMessage


@frozen
class BeginAttempt(Action):
    """Begin an attempt on this node, with the files that its ranks continue from. Before any but the first,
    forget the last attempt, and log `note`."""

    number: int = 0
    note: str = ""


@frozen
class StartRanks(Action):
    """Start the ranks of this node."""


@frozen
class RecordFailure(Action):
    """Keep a failure of this node that is no rank's own end: its report will name it."""

    observed: Observed


@frozen
class EndRanks(Action):
    """End the ranks of this node, after `grace` seconds with SIGKILL. `saving`: they may need all of it."""

    grace: float
    saving: bool = False
    cancelled: bool = False


@frozen
class AnnounceStop(Action):
    """Mark in the job's folder that the ranks of all nodes end, and ask the other nodes to end theirs."""

    cancelled: bool
    token: str
    grace: Optional[float]


@frozen
class Note(Action):
    """Write into the logs of the ranks."""

    text: str


@frozen
class LeaveStall(Action):
    """Keep, here and on the other nodes, that a stall is left alone."""

    detail: str


@frozen
class End(Action):
    """Record how the job has ended. Nothing follows. `missing`: why no rank was started, for `start`."""

    verdict: Verdict
    missing: Optional[Unreachable] = None
