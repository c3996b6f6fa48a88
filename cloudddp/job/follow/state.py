"""What is known about a job that is followed. Immutable: `apply` returns the state after an event. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cloudddp.agent.protocol.jobs import Cause, JobState, Verdict
from cloudddp.errors import NodeError
from cloudddp.job import outcome
from cloudddp.job.follow import events, lines
from cloudddp.job.follow.lines import OpenLine

TAIL_LINES = 20  # of each rank, kept for the report of its failure
TAIL_LINE_LENGTH = 4096  # characters; so that the size of a report is bounded


@dataclass(frozen=True, slots=True)
class Line:
    """A complete line of a rank's log, or one that will be overwritten, as it is now."""

    node: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class RankLog:
    """The end of one rank's log: the last complete lines, and the line that is not complete. `bar` is the
    text of that line when it was last shown as a progress bar."""

    tail: tuple[str, ...] = ()
    line: OpenLine = field(default_factory=OpenLine)
    bar: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is known about one node. `followed`: its stream has not ended."""

    followed: bool = True
    quiet: bool = False
    retried: bool = False  # it has sent nothing since it was connected to once more, or could not be
    disconnected_at: float | None = None
    lost: events.NodeLost | None = None
    job: JobState | None = None
    logs: Mapping[int, RankLog] = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True)
class FollowState:
    """What is known about a job. Times (`..._at`) are by the clock of Liveness; None means not yet."""

    nodes: Mapping[int, NodeState]
    lines: tuple[Line, ...] = ()  # completed by the last event
    aws_pending: bool = False  # a query to AWS is in progress
    aws_asked_at: float | None = None
    began_at: float | None = None  # the first event
    output_at: float | None = None  # a rank's last output
    output_rank: int | None = None  # which rank that was
    silence_at: float | None = None  # since then, a Silence was last reported
    bars_at: float | None = None  # progress bars were last shown

    @classmethod
    def of(cls, nodes: Iterable[int]) -> FollowState:
        return cls({node: NodeState() for node in nodes})

    # -- views -----------------------------------------------------------------------------------------------

    @property
    def followed(self) -> frozenset[int]:
        return frozenset(node for node, one in self.nodes.items() if one.followed)

    @property
    def quiet(self) -> frozenset[int]:
        return frozenset(node for node, one in self.nodes.items() if one.quiet)

    @property
    def retried(self) -> frozenset[int]:
        return frozenset(node for node, one in self.nodes.items() if one.retried)

    @property
    def disconnected(self) -> dict[int, float]:
        """The followed nodes whose connection is broken, and since when."""
        found = {node: one.disconnected_at for node, one in self.nodes.items() if one.followed}
        return {node: at for node, at in found.items() if at is not None}

    @property
    def lost(self) -> dict[int, events.NodeLost]:
        return {node: one.lost for node, one in self.nodes.items() if one.lost is not None}

    @property
    def jobs(self) -> dict[int, JobState]:
        """The job's state on each node that has reported one: `outcome.checked`."""
        return {node: one.job for node, one in self.nodes.items() if one.job is not None}

    @property
    def agreed(self) -> Verdict | None:
        """The verdict of the nodes, once any of them has reported it."""
        return outcome.agreed(self.jobs)

    @property
    def suspect(self) -> int | None:
        """The node that the others have lost, by their verdict: AWS may know why."""
        first = self.agreed.first if self.agreed is not None else None
        return first.node if first is not None and first.cause in (Cause.AGENT, Cause.SILENT) else None

    @property
    def faulty(self) -> NodeError | None:
        """The error of a node whose replies are not the agent's; None if there is none."""
        return next((lost.error for lost in self.lost.values() if lost.error is not None), None)

    # -- transitions -----------------------------------------------------------------------------------------

    def apply(self, event: events.Event, now: float) -> FollowState:
        """Return the state after an event, which is handled at `now` (clock of Liveness)."""
        before = replace(self, lines=()) if self.lines else self
        if before.began_at is None:
            before = replace(before, began_at=now)
        match event:
            case events.LogData(node, rank, data):
                if rank >= 0 and data:  # the output of torchrun and of the setup does not count
                    before = replace(before, output_at=now, output_rank=rank, silence_at=None)
                return before._with_log(node, rank, data)
            case events.BarsDue():
                return replace(before._with_bars(), bars_at=now)
            case events.Silence():
                return replace(before, silence_at=now)
            case events.JobUpdate(node, job):
                return before._with(node, job=outcome.checked(job), retried=False)
            case events.NodeFinished(node):
                return before._closed(node)
            case events.NodeLost():
                return before._with_lost([event])
            case events.NodeQuiet(node):
                return before._with(node, quiet=True)
            case events.NodeResponding(node):
                return before._with(node, quiet=False)
            case events.NodeDisconnected(node):
                return before._with(node, disconnected_at=now)
            case events.NodeReconnected(node):
                return before._with(node, disconnected_at=None, retried=True)
            case events.NodeUnreachable(node):
                return before._with(node, retried=True)
            case events.AwsAsked():
                return replace(before, aws_pending=True, aws_asked_at=now)
            case events.AwsReport(ended):
                return replace(before, aws_pending=False)._with_lost(ended)

    def _with(self, node: int, **fields: object) -> FollowState:
        changed = replace(self.nodes[node], **fields)  # type: ignore[arg-type]
        return replace(self, nodes={**self.nodes, node: changed})

    def _with_log(self, node: int, rank: int, data: bytes, *, last: bool = False) -> FollowState:
        logs = self.nodes[node].logs
        log = logs.get(rank, RankLog())
        complete, line = lines.split(log.line, data, last=last)
        if not complete:
            return self._with(node, logs={**logs, rank: replace(log, line=line)}, retried=False)
        tail = (*log.tail, *(text[:TAIL_LINE_LENGTH] for text in complete[-TAIL_LINES:]))[-TAIL_LINES:]
        changed = self._with(node, logs={**logs, rank: RankLog(tail, line)}, retried=False)
        return replace(changed, lines=(*self.lines, *(Line(node, rank, text) for text in complete)))

    def _with_bars(self) -> FollowState:
        """Return the state in which each progress bar that has changed is a line to show."""
        state = self
        for node, one in self.nodes.items():
            for rank, log in one.logs.items():
                text = log.line.text
                if log.line.overwritten and text and text != log.bar:
                    logs = {**state.nodes[node].logs, rank: replace(log, bar=text)}
                    state = state._with(node, logs=logs)
                    state = replace(state, lines=(*state.lines, Line(node, rank, text)))
        return state

    def _with_lost(self, lost: Iterable[events.NodeLost]) -> FollowState:
        """Return the state after the loss of nodes. One that is no longer followed is not lost."""
        state = self
        for event in lost:
            if state.nodes[event.node].followed:
                state = state._closed(event.node)._with(event.node, lost=event)
        return state

    def _closed(self, node: int) -> FollowState:
        """Return the state in which a node is no longer followed. Incomplete last lines count as lines."""
        state = self
        for rank, log in self.nodes[node].logs.items():
            if log.line.data:
                state = state._with_log(node, rank, b"", last=True)
        return state._with(node, followed=False, quiet=False)
