"""The status of a job from its state on each node, for the list of jobs and for the verdict of a followed
one. Pure.

Only this module and `status` depend on the fields of JobState.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from cloudddp.agent.protocol.jobs import Cause, Failure, JobState, RankRecord, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE, TrainingStatus
from cloudddp.agent.protocol.sentences import signal_name


def seconds(jobs: Iterable[JobState]) -> float | None:
    """Return how long a job ran where that was longest, each node by its own clock; None if no node knows
    both ends."""
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

    @classmethod
    def of(cls, phase: JobPhase) -> JobStatus:
        """Return the status that corresponds to the phase of a job on one node."""
        return cls(phase.value)

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
class RankFailure:
    """A rank that did not exit with 0. `ended` is in seconds since the epoch, by its node's clock."""

    rank: int
    node: int
    exit_code: int
    signal: int | None  # Linux's number of the signal that killed it
    ended: float
    stopped: bool = False  # killed by SIGTERM while cloudddp stopped the job: not a cause

    def __str__(self) -> str:
        how = (
            f"was killed by {signal_name(self.signal)}"
            if self.signal
            else f"exited with code {self.exit_code}"
        )
        return f"rank {self.rank} on node {self.node} {how}"


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
    """The status of a job. `exit_code` is None while it runs, and where no rank's own failure explains its
    end."""

    status: JobStatus
    exit_code: int | None
    failures: tuple[RankFailure, ...]  # by time
    training: TrainingStatus | None


def outcome(states: Mapping[int, JobState]) -> JobOutcome:
    """Return the status of a job from its state on each node (at least one).

    A job is not cancelled but failed if a rank failed before the cancel.
    """
    states = {node: checked(state) for node, state in states.items()}
    verdict = concluded(states)
    if verdict is not None:
        return _of_verdict(verdict, states)
    reported = {JobStatus.of(state.phase) for state in states.values()}
    status = next(status for status in _PRECEDENCE if status in reported)
    failures = _failures(states)
    cause = next((failure for failure in failures if not failure.stopped), None)
    if status is JobStatus.CANCELLED:
        cause = next((failure for failure in failures if failure.ended < cancelled_at(states.values())), None)
        status = JobStatus.CANCELLED if cause is None else JobStatus.FAILED
    training = TrainingStatus.from_replies(state.training for state in states.values())
    exit_code = _exit_code(status, cause, states.values())
    if status is JobStatus.FAILED and exit_code == PREEMPTED_EXIT_CODE and training and training.preempted:
        status = JobStatus.PREEMPTED
    return JobOutcome(status, exit_code, failures, training)


def leaving(states: Mapping[int, JobState]) -> int | None:
    """Return the node whose announced end has ended the job: a spot interruption, maintenance, or the
    cluster's deadline."""
    found = agreed(states)
    first = found.first if found is not None else None
    return first.node if first is not None and first.cause is Cause.NOTICE else None


def agreed(states: Mapping[int, JobState]) -> Verdict | None:
    """Return the verdict that the nodes have agreed on; None while there is none.

    Nodes that could not reach each other have decided apart: the verdict of the first node counts. That of a
    guard, which knows only that its supervisor was killed, counts where there is no other. A success that a
    node's own ranks contradict is none: a rank can write any file of its user.
    """
    for _, state in sorted(
        states.items(),
        key=lambda item: (item[1].verdict is not None and item[1].verdict.is_of_guard, item[0]),
    ):
        if state.verdict is not None:
            if state.verdict.phase is JobPhase.SUCCEEDED and any(
                one.phase.ended and one.phase is not JobPhase.SUCCEEDED for one in states.values()
            ):
                continue
            return state.verdict
    return None


def concluded(states: Mapping[int, JobState]) -> Verdict | None:
    """Return the verdict of a job: the one that the nodes have agreed on; or, where none is left that could
    give one, that the agent of the first such node has ended. None while a node may still decide, and for a
    job whose records are unreadable.

    A rank that failed before its agent ended is the cause, and no verdict is needed to know it. One that was
    killed by SIGKILL may have been killed with the agent.
    """
    verdict = agreed(states)
    lost = [node for node, state in sorted(states.items()) if _is_abandoned(state)]
    if verdict is not None or not lost:
        return verdict
    known = any(
        state.phase is JobPhase.CANCELLED
        or state.cancelled is not None
        or any(map(_failed_alone, state.ranks))
        for state in states.values()
    )
    if known or not all(state.phase.ended for state in states.values()):
        return None
    return Verdict(JobPhase.FAILED, 1, lost[0], Failure(lost[0], Cause.AGENT))


def _is_abandoned(state: JobState) -> bool:
    """Whether the agent of a node has ended without recording the end of the job."""
    return state.phase is JobPhase.LOST and state.node is not None


def _failed_alone(rank: RankRecord) -> bool:
    return bool(rank.exit_code) and not rank.asked and rank.signal != signal.SIGKILL


def _of_verdict(verdict: Verdict, states: Mapping[int, JobState]) -> JobOutcome:
    training = TrainingStatus.from_replies(state.training for state in states.values())
    status = JobStatus.of(verdict.phase)
    saved = verdict.exit_code == PREEMPTED_EXIT_CODE and training is not None and training.preempted
    noticed = verdict.first is not None and verdict.first.cause is Cause.NOTICE
    if status is JobStatus.FAILED and (noticed or saved):
        status = JobStatus.PREEMPTED
    return JobOutcome(status, verdict.exit_code, _failures(states), training)


def rebooted(states: Mapping[int, JobState]) -> dict[int, float]:
    """Return the nodes that were rebooted while the ranks of the job ran there, and when each started
    again."""
    found = {node: one.rebooted for node, one in sorted(states.items()) if not one.setup}
    return {node: at for node, at in found.items() if at is not None}


def _failures(states: Mapping[int, JobState]) -> tuple[RankFailure, ...]:
    found = [
        RankFailure(
            rank=rank.rank,
            node=node,
            exit_code=rank.exit_code,
            signal=rank.signal,
            ended=rank.ended,
            stopped=state.stopping and rank.signal == signal.SIGTERM,
        )
        for node, state in states.items()
        for rank in state.ranks
        if rank.exit_code and rank.ended is not None
    ]
    return tuple(sorted(found, key=lambda failure: failure.ended))


def _exit_code(status: JobStatus, cause: RankFailure | None, states: Iterable[JobState]) -> int | None:
    states = list(states)
    if not status.ended:
        return None
    if status is JobStatus.FAILED and any(state.ranks for state in states):
        return cause.exit_code if cause else None
    codes = [state.exit_code for state in states if state.exit_code]
    return next(iter(codes), 0 if status is JobStatus.SUCCEEDED else None)


def cancelled_at(states: Iterable[JobState]) -> float:
    """Return when a job was cancelled first, in seconds since the epoch by its node's clock; inf if it was
    not."""
    return min((state.cancelled for state in states if state.cancelled is not None), default=inf)


def as_failed(state: JobState) -> JobState:
    """Return the state of a job on a node that is lost: if it has not ended there, it has failed."""
    return state if state.phase.ended else replace(state, phase=JobPhase.FAILED)


def checked(state: JobState) -> JobState:
    """Return the state of a job on a node, as failed if it reports success although not every rank exited
    with 0: no agent does that, but a rank can replace the agent."""
    if state.phase is JobPhase.SUCCEEDED and not (state.ranks and ranks_succeeded(state)):
        return replace(state, phase=JobPhase.FAILED)
    return state


def ranks_succeeded(state: JobState) -> bool:
    """Whether every rank of a node has started, and exited with 0."""
    return len(state.ranks) == state.expected and all(rank.exit_code == 0 for rank in state.ranks)


def ranks_expected(states: Iterable[JobState]) -> int:
    """Return how many ranks a job has on the nodes that have reported its state."""
    return sum(len(state.ranks) if state.expected is None else state.expected for state in states)


def ranks_ended(states: Iterable[JobState]) -> int:
    return sum(rank.exit_code is not None for state in states for rank in state.ranks)


def failed_node(states: Mapping[int, JobState]) -> tuple[int, JobState]:
    """Return the node on which the job failed first, and its state there."""
    failed = [(node, state) for node, state in states.items() if state.phase is not JobPhase.SUCCEEDED]
    return min(failed, key=lambda item: inf if item[1].ended is None else item[1].ended)
