"""How a job ended, from the last state of following it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from cloudddp.agent.protocol import LAUNCHER_RANK, SETUP_RANK
from cloudddp.agent.protocol.jobs import Cause, JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE, TrainingStatus
from cloudddp.job import failure_text, outcome
from cloudddp.job.follow.state import TAIL_LINE_LENGTH, FollowState
from cloudddp.job.outcome import JobOutcome, JobStatus, RankFailure
from cloudddp.text import one_line

CANCELLED_EXIT_CODE = 130


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended, for messages to the user. `exit_code` is what the command exits with."""

    job: str
    status: JobStatus
    exit_code: int
    cause: str = ""  # one sentence
    last_lines: tuple[str, ...] = ()  # of the rank that failed first, or of the launcher
    # Ranks that have ended: all of a job that has succeeded; None where a node has not reported how many.
    ranks: int | None = 0
    lost: tuple[int, ...] = ()  # nodes
    lost_reasons: tuple[str, ...] = ()  # why, in the same order
    suspect: int | None = None  # a node that the others have lost: AWS may know why
    unverified: tuple[int, ...] = ()  # nodes on which processes may be left
    training: TrainingStatus | None = None  # where the training was, if the script has reported it
    leaving: int | None = None  # the node that is about to end
    rebooted: tuple[int, ...] = ()  # nodes on which it ended because they were rebooted
    restarts: int = 0  # how often all ranks were started again
    seconds: float | None = None  # from its start to its end, by the nodes' clocks

    @property
    def doubtful(self) -> frozenset[int]:
        """The nodes whose instances may have ended: those that were lost, and the one that the others have
        lost."""
        return frozenset(self.lost if self.suspect is None else (*self.lost, self.suspect))


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the job ended: the part of a result that is decided here."""

    status: JobStatus
    exit_code: int
    cause: str = ""
    last_lines: tuple[str, ...] = ()


def verdict(state: FollowState, job: str, wall: float) -> JobResult:
    """Return how the job ended. `wall` is the time now, in seconds since the epoch.

    A node that is still followed has not ended its stream: processes of the job may be left there.
    """
    unfinished = state.followed | state.lost.keys()
    jobs = {node: outcome.as_failed(one) if node in unfinished else one for node, one in state.jobs.items()}
    found = outcome.outcome(jobs) if jobs else None
    first = found.failures[0] if found and found.failures else None
    ending = (
        _faulty_ending(state)
        or _agreed_ending(state)
        or _connection_ending(state, first, wall)
        or _abandoned_ending(jobs)
        or _job_ending(state, found, first)
    )
    return JobResult(
        job,
        ending.status,
        ending.exit_code,
        cause=ending.cause,
        last_lines=ending.last_lines,
        ranks=_ranks(state, ending.status),
        lost=tuple(sorted(state.lost)),
        lost_reasons=tuple(state.lost[node].reason for node in sorted(state.lost)),
        suspect=state.suspect,
        unverified=tuple(sorted(state.followed)),
        training=found.training if found else None,
        leaving=outcome.leaving(state.jobs),
        rebooted=tuple(outcome.rebooted(state.jobs)),
        restarts=max((job.restarts for job in state.jobs.values()), default=0),
        seconds=outcome.seconds(state.jobs.values()),
    )


def _ranks(state: FollowState, status: JobStatus) -> int | None:
    """Return how many ranks have ended. A success is one of every rank, also where a node no longer responds
    and its last state is older; None where such a node has sent none."""
    if status is not JobStatus.SUCCEEDED:
        return outcome.ranks_ended(state.jobs.values())
    return None if state.jobs.keys() != state.nodes.keys() else outcome.ranks_expected(state.jobs.values())


def _faulty_ending(state: FollowState) -> _Ending | None:
    return None if state.faulty is None else _Ending(JobStatus.FAILED, 1, state.faulty.message)


def _agreed_ending(state: FollowState) -> _Ending | None:
    """Return how the job ended by the verdict of its nodes, which counts also for those whose last state is
    older."""
    verdict = state.agreed
    if verdict is None:
        return None
    found = outcome.outcome(state.jobs)
    if found.status is JobStatus.CANCELLED:
        return _Ending(JobStatus.CANCELLED, CANCELLED_EXIT_CODE)
    if found.status is JobStatus.SUCCEEDED:
        return _Ending(JobStatus.SUCCEEDED, 0)
    if found.status is JobStatus.PREEMPTED:
        noticed = verdict.first is not None and verdict.first.cause is Cause.NOTICE
        asked = (
            failure_text.sentence(verdict.first)
            if verdict.first is not None and noticed
            else "its ranks were asked to stop (SIGTERM)"
        )
        return _Ending(JobStatus.PREEMPTED, PREEMPTED_EXIT_CODE, asked)
    cause = failure_text.why(verdict, state.jobs) or "its ranks were ended, and no node knows why"
    return _Ending(JobStatus.FAILED, verdict.exit_code, cause, verdict.last_lines)


def _connection_ending(state: FollowState, first: RankFailure | None, wall: float) -> _Ending | None:
    """Return how the job ended if it ended because nodes were lost, else None."""
    if state.all_ended:
        first_lost = min(state.lost)
        why = f"node {first_lost}: {state.lost[first_lost].reason}"
        return _Ending(JobStatus.FAILED, 1, f"none of its nodes is running any more; {why}")
    if state.all_lost:
        cause = "lost connection to all nodes; the job may still be running"
        return _Ending(JobStatus.UNKNOWN, 1, cause)
    lost_at = min((lost.since for lost in state.lost.values()), default=inf)
    if not state.lost or (first is not None and first.ended < lost_at):
        return None
    node = min(state.lost)
    lost = state.lost[node]
    cause = f"node {node} was lost: not responding for {wall - lost.since:.0f} s ({lost.reason})"
    return _Ending(JobStatus.FAILED, 1, cause)


def _abandoned_ending(jobs: Mapping[int, JobState]) -> _Ending | None:
    """Return how the job ended if no node is left that could give a verdict."""
    verdict = outcome.concluded(jobs)
    if verdict is None or verdict.first is None:
        return None
    return _Ending(JobStatus.FAILED, verdict.exit_code, failure_text.why(verdict, jobs))


def _job_ending(state: FollowState, found: JobOutcome | None, first: RankFailure | None) -> _Ending:
    """Return how the job ended by what its nodes report."""
    if found is None or not found.status.ended:
        return _Ending(JobStatus.RUNNING, first.exit_code if first else 0)
    if found.status is JobStatus.SUCCEEDED:
        return _Ending(JobStatus.SUCCEEDED, 0)
    if found.status is JobStatus.CANCELLED:
        return _Ending(JobStatus.CANCELLED, CANCELLED_EXIT_CODE)
    if first is None and state.followed:
        cause = f"node {min(state.followed)} did not report the end of the job after it was stopped"
        return _Ending(JobStatus.FAILED, 1, cause)
    if first is None:
        return _launcher_ending(state, *outcome.failed_node(state.jobs))
    if first.stopped and (earlier := _failed_before(state, first.ended)):
        return _launcher_ending(state, *outcome.failed_node(earlier))
    if found.status is JobStatus.PREEMPTED:
        return _Ending(JobStatus.PREEMPTED, PREEMPTED_EXIT_CODE, "its ranks were asked to stop (SIGTERM)")
    return _Ending(JobStatus.FAILED, first.exit_code, f"{first} first", _tail(state, first.node, first.rank))


def _failed_before(state: FollowState, moment: float) -> dict[int, JobState]:
    """Return the nodes on which the job had failed before, although no rank had: the ranks of others are then
    stopped."""
    return {
        node: job
        for node, job in state.jobs.items()
        if job.phase in (JobPhase.FAILED, JobPhase.LOST)
        and not any(rank.exit_code for rank in job.ranks)
        and (job.ended or 0.0) < moment
    }


def _launcher_ending(state: FollowState, node: int, job: JobState) -> _Ending:
    """No rank failed, yet the job did: torchrun itself failed, or the processes could not be started."""
    code = "" if job.exit_code is None else f" with code {job.exit_code}"
    if job.setup:
        why = failure_text.setup_ending(node, job)
        return _Ending(JobStatus.FAILED, job.exit_code or 1, why, _tail(state, node, SETUP_RANK))
    why = one_line(job.error, TAIL_LINE_LENGTH) or f"the launcher exited{code} before its ranks had finished"
    return _Ending(
        JobStatus.FAILED, job.exit_code or 1, f"node {node}: {why}", _tail(state, node, LAUNCHER_RANK)
    )


def _tail(state: FollowState, node: int, rank: int) -> tuple[str, ...]:
    log = state.nodes[node].logs.get(rank)
    return log.tail if log else ()
