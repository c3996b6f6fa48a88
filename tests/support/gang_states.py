"""The agents of a job as states, whose messages reach each other at once or late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agent.gang import events
from agent.gang.decision import Budget
from agent.gang.state import GangState, Policy
from agent.gang.step import step
from cloudddp.agent.protocol.gang import Kind, NodeFacts, Observed, PeerMessage, Report, Unreachable
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase

POLICY = Policy(silence=15.0, stop_grace=10.0, join_by=20.0, facts_by=60.0, kill_seconds=5.0)
SUCCESS = Report(True)
NOTICE = Failure(1, Cause.NOTICE, exit_code=143, detail="spot notice")
STOPPED = Report(False, exit_code=143)


def failed(node: int, code: int = 7, *, step: int | None = None) -> Report:
    """The report of a node whose rank of the same number has failed."""
    return Report(False, (Observed(Failure(node, Cause.RANK, node, code), 0.0, ("last",)),), step=step)


class Job:
    """The nodes of a job. What a node sends reaches the others at once, unless it is `cut`; `actions` are
    what each node was told to do, without what it sent."""

    def __init__(self, count: int = 2, *, retries: int = 0, stalls: bool = False, **policy: Any) -> None:
        names = frozenset(range(count))
        self.now = 1.0
        self.cut: set[int] = set()  # nodes that get and send nothing
        self.actions: list[list[events.Action]] = [[] for _ in names]
        self.sent: list[tuple[int, PeerMessage]] = []
        self.heard = dict.fromkeys(names, self.now)
        own = replace(POLICY, **policy)
        self.states: list[GangState] = [
            GangState(node, names, own, Budget(retries, stalls=stalls)) for node in range(count)
        ]

    def event(self, node: int, event: events.Event) -> None:
        """Something happens on a node; what follows from it on all nodes happens, too."""
        moment = events.Moment(self.now, 1e9 + self.now)
        self.states[node], actions = step(self.states[node], event, moment)
        for action in actions:
            if isinstance(action, events.Send):
                self._send(node, action.message)
            else:
                self.actions[node].append(action)
                for message in self._message_of(action):
                    self._send(node, replace(message, attempt=self.states[node].attempt))

    def _message_of(self, action: events.Action) -> Iterator[PeerMessage]:
        """What the loop sends for an action."""
        if isinstance(action, events.AnnounceStop):
            yield PeerMessage(Kind.STOP, cancelled=action.cancelled, token=action.token, grace=action.grace)
        elif isinstance(action, events.SendHeartbeat):
            yield PeerMessage(Kind.HEARTBEAT, finished=True)

    def _send(self, node: int, message: PeerMessage) -> None:
        self.sent.append((node, message))
        for other in range(len(self.states)):
            if other != node and not {node, other} & self.cut:
                self.heard[node] = self.now
                self.event(other, events.MessageReceived(node, message))

    def wait(self, seconds: float) -> None:
        """Time passes on the nodes that are not cut: they send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for node in self.working:
                self.heard[node] = self.now
            for node in self.working:
                self.event(node, self.tick())

    def tick(self, *, is_connected: bool = True, missing: Unreachable = events.NONE_MISSING) -> events.Tick:
        """One turn of a node's loop, when the others sent something as `heard` says."""
        return events.Tick(self.heard, is_connected, missing)

    @property
    def working(self) -> list[int]:
        return [node for node in range(len(self.states)) if node not in self.cut]

    def joined(self) -> Job:
        """All nodes connect, are alike, and start their ranks."""
        for node in self.working:
            self.event(node, events.FactsFound(NodeFacts(gpus="8 x NVIDIA H100")))
            self.event(node, self.tick())
        self.copied()
        assert all(self.did(node, events.StartRanks) for node in self.working)
        return self

    def copied(self) -> None:
        for node in self.working:
            self.event(node, events.Copied())

    def ended(self, node: int, report: Report = STOPPED) -> None:
        """No process of a node's ranks is left."""
        assert self.states[node].is_ending
        self.event(node, events.RanksEnded(report))

    def did(self, node: int, kind: type[Any]) -> list[Any]:
        return [one for one in self.actions[node] if isinstance(one, kind)]

    def verdict(self, *nodes: int) -> Verdict:
        """Return the verdict of these nodes, or of those that are not cut: it is the same one."""
        found = [self.states[node].verdict for node in nodes or self.working]
        assert found[0] is not None
        assert found == [found[0]] * len(found), found
        for node in nodes or self.working:
            assert [one.verdict for one in self.did(node, events.End)] == [found[0]]
        return found[0]

    @property
    def first(self) -> Failure:
        found = self.verdict()
        assert found.phase is JobPhase.FAILED
        assert found.first is not None
        return found.first


def failure_of(job: Job, node: int, report: Report) -> None:
    """A rank of a node fails, and those of all nodes are ended."""
    job.event(node, events.RanksChecked(failed=True))
    for other in job.working:
        job.ended(other, report if other == node else STOPPED)
