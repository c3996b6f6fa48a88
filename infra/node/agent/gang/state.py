"""What the agent of one node knows of its job. Pure: see step.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Optional

from agent.gang.decision import Budget, TimedReport
from agent.gang.events import NONE_MISSING, MessageReceived
from agent.ranks.causes import TimedFailure
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import NodeFacts, Unreachable
from cloudddp.agent.protocol.jobs import Verdict

NEVER = float("inf")


@frozen
class Policy:
    """What was asked for, in seconds. By the monotonic clock, nodes are connected until `join_by`, and their
    facts known until `facts_by`. `kill_seconds`: for the end of processes that got SIGKILL."""

    silence: float
    stop_grace: float
    join_by: float
    facts_by: float
    kill_seconds: float
    preflight: bool = True
    leaves_stalls: bool = False


@frozen
class GangState:
    """What this node knows. `finished` and `reports` hold this node, too."""

    node: int
    nodes: frozenset[int]
    policy: Policy
    budget: Budget
    # -- until the ranks of all nodes can start
    is_joined: bool = False
    is_announced: bool = False  # the other nodes know that this one is connected to all, and what it is like
    is_connected: bool = False
    missing: Unreachable = NONE_MISSING
    facts: Mapping[int, NodeFacts] = field(default_factory=dict)
    skews: Mapping[int, float] = field(default_factory=dict)  # seconds by which the clock of a node is ahead
    ready: frozenset[int] = frozenset()  # other nodes that are connected to all
    problems: tuple[str, ...] = ()  # why the ranks must not start although all are connected
    problems_at: float = NEVER
    # -- all the time
    lost: Mapping[int, TimedFailure] = field(default_factory=dict)  # nodes whose agent has ended or is silent
    errors: Mapping[int, str] = field(default_factory=dict)  # of agents that are about to end because of them
    ticked_at: float = 0.0
    resumed_at: float = 0.0  # when this node last went on after it was frozen: the others count as heard then
    is_cancelled: bool = False
    verdict: Optional[Verdict] = None
    # -- of this attempt
    attempt: int = 0
    ranks_started: bool = False
    is_ending: bool = False  # the ranks of this node are being ended, or have ended
    is_stopping: bool = False  # those of all nodes are being ended
    end_deadline: float = NEVER  # when that is over on all nodes at the latest
    finished: frozenset[int] = frozenset()  # nodes whose ranks have all exited with 0
    finished_at: float = NEVER  # when those of all nodes had
    reports: Mapping[int, TimedReport] = field(default_factory=dict)
    early: tuple[MessageReceived, ...] = ()  # messages about an attempt that has not begun here

    @property
    def others(self) -> frozenset[int]:
        return self.nodes - {self.node}

    @property
    def left(self) -> frozenset[int]:
        """The nodes that are not lost. The first of them decides."""
        return self.nodes - self.lost.keys()

    @property
    def is_first(self) -> bool:
        return self.node == min(self.left)

    @property
    def has_reported(self) -> bool:
        return self.node in self.reports

    @property
    def all_finished(self) -> bool:
        """Whether every rank of the job has exited with 0."""
        return self.nodes <= self.finished

    @property
    def losses(self) -> list[TimedFailure]:
        """The failures of the nodes that were lost before their ranks had ended."""
        return [one for one in self.lost.values() if one.at != NEVER]
