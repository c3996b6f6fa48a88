"""How a job ended, from the last state of following it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from cloudddp.agent.protocol import SETUP_RANK
from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE, TrainingStatus
from cloudddp.job import failure_text, outcome
from cloudddp.job.follow.state import FollowState, NodeState, RankLog
from cloudddp.job.outcome import JobOutcome, JobStatus

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
        """The nodes whose instances may have ended: those lost to this computer or to the other nodes."""
        return frozenset(self.lost if self.suspect is None else (*self.lost, self.suspect))


_result = partial(JobResult, "")  # status, exit code, cause, last lines


def verdict(state: FollowState, job: str, wall: float) -> JobResult:
    """Return how the job ended. `wall`: the time now. Processes may be left on nodes that are still
    followed."""
    found = outcome.outcome(state.jobs) if state.jobs else None
    ending = _connection_ending(state, wall) or _job_ending(state, found)
    return replace(
        ending,
        job=job,
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
        return sum(rank.exit_code is not None for job in state.jobs.values() for rank in job.ranks)
    if state.jobs.keys() != state.nodes.keys():
        return None
    return sum(len(job.ranks) if job.expected is None else job.expected for job in state.jobs.values())


def _connection_ending(state: FollowState, wall: float) -> JobResult | None:
    """Return how the job ended if it ended because nodes were lost, or sent what no agent sends; else None.
    What the nodes have agreed on counts also for those whose last state is older."""
    if state.faulty is not None:
        return _result(JobStatus.FAILED, 1, state.faulty.message)
    if not state.lost or state.agreed is not None:
        return None
    node = min(state.lost)
    lost = state.lost[node]
    if state.lost.keys() == state.nodes.keys():
        if all(one.instance_ended for one in state.lost.values()):
            why = f"none of its nodes is still running; node {node}: {lost.reason}"
            return _result(JobStatus.FAILED, 1, why)
        # Most likely this computer is offline.
        cause = "lost connection to all nodes; the job may still be running"
        return _result(JobStatus.UNKNOWN, 1, cause)
    cause = f"node {node} was lost: not responding for {wall - lost.since:.0f} s ({lost.reason})"
    return _result(JobStatus.FAILED, 1, cause)


def _job_ending(state: FollowState, found: JobOutcome | None) -> JobResult:
    if found is None or not found.status.ended:
        return _result(JobStatus.RUNNING, 0)
    if found.status is JobStatus.SUCCEEDED:
        return _result(JobStatus.SUCCEEDED, 0)
    if found.status is JobStatus.CANCELLED:
        return _result(JobStatus.CANCELLED, CANCELLED_EXIT_CODE)
    verdict, code = found.verdict, found.exit_code or 1
    first = verdict.first if verdict is not None else None
    if found.status is JobStatus.PREEMPTED:
        cause = "its ranks were asked to stop (SIGTERM)"
        if first is not None and first.cause is Cause.NOTICE:
            cause = failure_text.sentence(first)
        return _result(JobStatus.PREEMPTED, PREEMPTED_EXIT_CODE, cause)
    cause = failure_text.cause(state.jobs) or "its ranks were ended, and no node knows why"
    if verdict is None:
        node = failure_text.failed_setup(state.jobs)
        return _result(JobStatus.FAILED, code, cause, () if node is None else _tail(state, node, SETUP_RANK))
    tail = () if first is None or first.rank is None else _tail(state, first.node, first.rank)
    return _result(JobStatus.FAILED, code, cause, verdict.last_lines or tail)


def _tail(state: FollowState, node: int, rank: int) -> tuple[str, ...]:
    found = state.nodes.get(node, NodeState())  # another one may be all that is followed
    return found.logs.get(rank, RankLog()).tail
