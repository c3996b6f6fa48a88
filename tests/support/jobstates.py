"""Builders of the job states that nodes report, of the state of following a job, and of the nodes of a
launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cloudddp.agent.protocol.jobs import Failure, JobState, RankRecord, Verdict
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.job.follow.events import Event, JobUpdate, NodeLost
from cloudddp.job.follow.state import FollowState
from cloudddp.job.ranks import LaunchNode

SIGTERM, SIGKILL = 15, 9


def rank(number: int, exit_code: int | None = None, ended: float | None = None, **fields: Any) -> RankRecord:
    """A rank; one with an exit code has ended, at 100 by default."""
    if exit_code is not None and ended is None:
        ended = 100.0
    return RankRecord(number, exit_code, ended, **fields)


def killed(number: int, signal: int, *, asked: bool = False) -> RankRecord:
    return rank(number, 128 + signal, signal=signal, asked=asked)


def job(phase: str, *ranks: RankRecord, **fields: Any) -> JobState:
    """The state of a job on one node. `expected` is the number of ranks given by default."""
    return JobState("j", JobPhase(phase), ranks=ranks, **{"expected": len(ranks), **fields})


def update(node: int, phase: str, *ranks: RankRecord, **fields: Any) -> JobUpdate:
    return JobUpdate(node, job(phase, *ranks, **fields))


def agreed(phase: str = "failed", first: Failure | None = None, code: int = 1, *lines: str) -> Verdict:
    """The verdict of the nodes, decided by node 0."""
    codes = {"succeeded": 0, "cancelled": 130}
    return Verdict(JobPhase(phase), codes.get(phase, code), 0, first, lines)


def lost(node: int, since: float = 1.0, *, reason: str = "no route to host", ended: bool = False) -> NodeLost:
    return NodeLost(node, reason, since, instance_ended=ended)


def followed(events: Iterable[Event], *, nodes: int = 2, at: float = 0.0) -> FollowState:
    """The state after events that were all handled at one time."""
    state = FollowState.of(range(nodes))
    for event in events:
        state = state.apply(event, at)
    return state


def launch_node(number: int, **probed: Any) -> LaunchNode:
    """A node that was probed; it has 8 CPUs by default."""
    reply = {"cpus": 8, "free_port": 29500, "agent_port": 29501, "time": 0.0, "running": (), **probed}
    return LaunchNode(
        number,
        f"10.0.0.{number + 1}",
        ProbeReply(**reply, timer_state="", timer_next=""),  # type: ignore[arg-type]
    )
