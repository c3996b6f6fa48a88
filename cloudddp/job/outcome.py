"""The status of a job from its state on each node, for the list of jobs and for the verdict of a followed
one. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from cloudddp.agent.protocol.jobs import Cause, Failure, JobState, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE, TrainingStatus


def seconds(jobs: Iterable[JobState]) -> float | None:
    """Return how long a job ran at most, each node by its own clock; None if no node knows both ends."""
    ran = [job.ended - job.started for job in jobs if job.ended is not None and job.started is not None]
    return max(0.0, *ran) if ran else None


class JobStatus(StrEnum):
    """The status of a job on all its nodes together. The values are part of `jobs --json`."""

    SETUP = "setup"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # a supervisor ended without recording the outcome
    # the ranks were asked to save and stop (SIGTERM): a node is about to end, or they have saved
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"  # all connections were lost; the job may still be running

    @property
    def ended(self) -> bool:
        return self not in (JobStatus.SETUP, JobStatus.STARTING, JobStatus.RUNNING, JobStatus.UNKNOWN)


# The status of a job is the first of these that any node reports.
_PRECEDENCE = (
    JobStatus.RUNNING,
    JobStatus.STARTING,
    JobStatus.SETUP,
    JobStatus.LOST,
    JobStatus.CANCELLED,
    JobStatus.FAILED,
    JobStatus.SUCCEEDED,
)


@dataclass(frozen=True, slots=True)
class ExitedRank:
    """A rank that has exited with code 0. `ended` is in seconds since the epoch, by its node's clock."""

    rank: int
    node: int
    ended: float


def exited_ranks(states: Mapping[int, JobState]) -> tuple[ExitedRank, ...]:
    """Return the ranks that have exited with code 0, the first one first. Pure."""
    found = [
        ExitedRank(rank.rank, node, rank.ended)
        for node, state in states.items()
        for rank in state.ranks
        if rank.exit_code == 0 and rank.ended is not None
    ]
    return tuple(sorted(found, key=lambda one: (one.ended, one.rank)))


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """`exit_code` and `verdict` are None while the job runs, and where no node knows them."""

    status: JobStatus
    exit_code: int | None
    verdict: Verdict | None
    training: TrainingStatus | None


def outcome(states: Mapping[int, JobState]) -> JobOutcome:
    """Return the status of a job from its state on each node (at least one). Every node records a verdict
    before the end of a job whose ranks have started."""
    states = {node: checked(state) for node, state in states.items()}
    training = TrainingStatus.from_replies(state.training for state in states.values())
    verdict = concluded(states)
    if verdict is not None:
        status = JobStatus(verdict.phase.value)
        saved = verdict.exit_code == PREEMPTED_EXIT_CODE and training is not None and training.preempted
        noticed = verdict.first is not None and verdict.first.cause is Cause.NOTICE
        if status is JobStatus.FAILED and (noticed or saved):
            status = JobStatus.PREEMPTED
        return JobOutcome(status, verdict.exit_code, verdict, training)
    reported = {JobStatus(state.phase.value) for state in states.values()}
    status = next(status for status in _PRECEDENCE if status in reported)
    codes = [state.exit_code for state in states.values() if state.exit_code and status.ended]
    exit_code = next(iter(codes), 0 if status is JobStatus.SUCCEEDED else None)
    return JobOutcome(status, exit_code, None, training)


def leaving(states: Mapping[int, JobState]) -> int | None:
    """Return the node whose end, which was announced, has ended the job, None for none."""
    found = agreed(states)
    first = found.first if found is not None else None
    return first.node if first is not None and first.cause is Cause.NOTICE else None


def agreed(states: Mapping[int, JobState]) -> Verdict | None:
    """Return the verdict that the nodes have agreed on; None while there is none. Of nodes that have decided
    apart, that of the first counts; that of a guard, which knows only that its supervisor was killed, comes
    last. A success that a node's own ranks contradict is none: a rank can write any file of its user."""
    failed = any(one.phase.ended and one.phase is not JobPhase.SUCCEEDED for one in states.values())
    found = [
        (one.verdict.is_of_guard, node, one.verdict)
        for node, one in states.items()
        if one.verdict is not None and not (failed and one.verdict.phase is JobPhase.SUCCEEDED)
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def concluded(states: Mapping[int, JobState]) -> Verdict | None:
    """Return the verdict of a job: the one that the nodes have agreed on, or, where none is left that could
    give one, that a rank has failed, or that the agent of the first such node has ended. None while a node
    may still decide, and for unreadable records. A rank that failed before its agent ended is the cause, but
    one that was killed by SIGKILL may have been killed with the agent."""
    verdict = agreed(states)
    if verdict is not None or not all(state.phase.ended for state in states.values()):
        return verdict
    failed = [
        (rank.ended, node, rank)
        for node, state in states.items()
        for rank in state.ranks
        if rank.exit_code and rank.ended is not None and not rank.asked and rank.signal != signal.SIGKILL
    ]
    if failed:
        _, node, rank = min(failed, key=lambda one: one[:2])
        first = Failure(node, Cause.RANK, rank.rank, rank.exit_code, rank.signal)
        return Verdict(JobPhase.FAILED, rank.exit_code or 1, node, first)
    lost = [node for node, one in states.items() if one.phase is JobPhase.LOST and one.node is not None]
    cancelled = any(one.phase is JobPhase.CANCELLED or one.cancelled is not None for one in states.values())
    if cancelled or not lost:
        return None
    return Verdict(JobPhase.FAILED, 1, min(lost), Failure(min(lost), Cause.AGENT))


def rebooted(states: Mapping[int, JobState]) -> dict[int, float]:
    """Return the nodes that were rebooted while ranks of the job ran there, and when each started again."""
    found = {node: one.rebooted for node, one in sorted(states.items()) if not one.setup}
    return {node: at for node, at in found.items() if at is not None}


def checked(state: JobState) -> JobState:
    """Return the state of a job on a node, as failed if it reports success although not every rank exited
    with 0: no agent does that, but a rank can replace the agent."""
    codes = [rank.exit_code for rank in state.ranks]
    if state.phase is JobPhase.SUCCEEDED and not (codes and codes == [0] * (state.expected or 0)):
        return replace(state, phase=JobPhase.FAILED)
    return state
