"""The jobs of a cluster, as its nodes record them: the list is the same on any laptop with the key."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.copies import Copied
from cloudddp.agent.protocol.jobs import ConcludeRequest, JobsRequest, JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import Straggler, ToleratedStall, TrainingStatus
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.job.failure_text import cause
from cloudddp.job.job_request import LONGEST_SCRIPT
from cloudddp.job.outcome import ExitedRank, JobStatus, agreed, exited_ranks, leaving, outcome, rebooted
from cloudddp.text import one_line

_NEWEST = 3  # jobs that a message lists
LONGEST_DETAIL = 2000  # characters of what the nodes write about a stall


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job on all its nodes together. Times are seconds since the epoch; `nodes` are node ranks. `ended` is
    None while it runs, and for a job that ended when no node could record it (LOST)."""

    id: str
    status: JobStatus
    exit_code: int | None
    script: str
    started: float | None
    ended: float | None
    nodes: tuple[int, ...]
    rank_zero: int | None  # the node that runs rank 0
    ranks: int  # how many there are when all have started, on the nodes that answered
    training: TrainingStatus | None = None  # where the training is, if the script reports it
    poweroff: float | None = None  # seconds without a use after it, until its nodes end
    grace: float | None = None  # once it has ended: seconds without a use after which the first node ends
    unused: float = 0.0  # for how many seconds that one was unused when it answered
    resumed_from: str = ""  # the job that it continues
    stragglers: tuple[Straggler, ...] = ()  # ranks that are slow, or were
    stall: ToleratedStall | None = None  # the last one that was left alone (on_stall = "leave")
    copied: tuple[tuple[int, Copied], ...] = ()  # what each node has copied to S3
    leaving: int | None = None  # the node whose announced end has ended it
    rebooted: tuple[int, ...] = ()  # nodes on which it ended because they were rebooted
    exited: tuple[ExitedRank, ...] = ()  # ranks that have exited with code 0
    restarts: int = 0  # how often all ranks were started again
    cause: str = ""  # why it has failed
    setup: bool = False  # it is in its setup, or has ended there: no rank was started

    @property
    def stalled(self) -> ToleratedStall | None:
        """The stall, where the job runs and no rank does anything; else None."""
        running = self.stall is not None and self.stall.until is None and not self.status.ended
        return self.stall if running else None

    @property
    def seconds(self) -> float | None:
        """How long it has run, or ran; None before it starts, and where its end is unknown."""
        end = self.ended if self.status.ended else time.time()
        return None if self.started is None or end is None else max(end - self.started, 0.0)


def list_jobs(
    runner: Runner, *, silent: dict[int, NodeError] | None = None, seconds: float = 60.0
) -> list[JobRecord]:
    """Return the jobs that the nodes have recorded, newest last. Raises NodeError, also for a node that needs
    more than `seconds`. `silent` takes the nodes whose connection breaks meanwhile; otherwise that is an
    error, too."""
    replies = client.call_all(
        runner, dict.fromkeys(runner.nodes, JobsRequest()), timeout=seconds, silent=silent
    )
    jobs: dict[str, dict[int, JobState]] = {}
    for node, reply in replies.items():
        for state in reply.jobs:
            jobs.setdefault(state.job, {})[node] = state
    for job_id, states in jobs.items():
        _conclude(runner, job_id, states)
    return [record(job_id, states) for job_id, states in sorted(jobs.items())]


def _conclude(runner: Runner, job_id: str, states: Mapping[int, JobState]) -> None:
    """Record the verdict of a job on nodes whose agent ended without one, or that have decided alone: every
    later command is to get the same answer, also when the nodes that know it have gone."""
    verdict = agreed(states) if all(state.phase.ended for state in states.values()) else None
    others = {
        node
        for node, state in states.items()
        if state.phase is JobPhase.LOST or state.verdict not in (None, verdict)
    }
    if verdict is None or not others:
        return

    def conclude(node: int) -> None:
        with contextlib.suppress(NodeError):  # tried again by the next command
            client.call(runner, node, ConcludeRequest(job_id, verdict))

    runner.each(conclude, nodes=others).all()


def record(job_id: str, states: Mapping[int, JobState]) -> JobRecord:
    """Return a job, from its state on each node that has answered. While a node still runs its part, the job
    has not ended, and what others have decided may not be what counts. Pure."""
    if not all(state.phase.ended for state in states.values()):
        states = {node: replace(state, verdict=None) for node, state in states.items()}
    found = outcome(states)
    reported = states.values()
    ending = [(one.grace - one.unused, one) for one in reported if one.grace is not None]
    first = min(ending, key=lambda one: one[0])[1] if ending else None
    # All nodes record the same ones; of a node that was cut off meanwhile the record is older.
    slow = sorted((one for state in reported for one in state.stragglers), key=_last_change)
    # At the moment of its verdict, whichever nodes answer; else when the last of them ended.
    verdict = agreed(states)
    ended = verdict.at if verdict is not None else None
    ended = ended or max((one.ended for one in reported if one.ended is not None), default=None)
    stall = max((one.stall for one in reported if one.stall), key=_last_change, default=None)
    return JobRecord(
        id=job_id,
        status=found.status,
        exit_code=found.exit_code,
        script=one_line(next(iter(reported)).script, LONGEST_SCRIPT),
        started=min((one.started for one in reported if one.started is not None), default=None),
        ended=ended if found.status.ended else None,
        nodes=tuple(sorted(states)),
        rank_zero=next(
            (node for node, one in states.items() if any(rank.rank == 0 for rank in one.ranks)), None
        ),
        ranks=sum(one.expected or 0 for one in reported),
        training=found.training,
        poweroff=max((one.poweroff for one in reported if one.poweroff is not None), default=None),
        grace=first.grace if first is not None else None,
        unused=first.unused if first is not None else 0.0,
        resumed_from=next((one.resumed_from for one in reported if one.resumed_from), ""),
        stragglers=tuple(one for _, one in sorted({one.rank: one for one in slow}.items())),
        stall=stall and replace(stall, detail=one_line(stall.detail, LONGEST_DETAIL)),
        leaving=leaving(states),
        rebooted=tuple(rebooted(states)),
        copied=tuple((node, one.copied) for node, one in sorted(states.items()) if one.copied is not None),
        exited=exited_ranks(states),
        restarts=max((one.restarts for one in reported), default=0),
        cause=cause(states),
        setup=all(one.setup for one in reported),
    )


def _last_change(one: Straggler | ToleratedStall) -> float:
    return one.since if one.until is None else one.until


class UnknownJob(CloudDDPError):
    """The nodes of a cluster do not know a job."""


def find(jobs: Sequence[JobRecord], wanted: str | None) -> JobRecord:
    """Return the job of that id (or of its unique beginning), or the newest: of those that run, if any does.
    Raises UnknownJob for none, CloudDDPError for several."""
    if not jobs:
        text = "no job has been launched on this cluster"
        raise UnknownJob(text, hint="start one: `cloudddp launch SCRIPT`")
    if wanted is None:
        return next((job for job in reversed(jobs) if not job.status.ended), jobs[-1])
    matching = [job for job in jobs if job.id.startswith(wanted)]
    found = [one for one in matching if one.id == wanted] or matching
    if len(found) != 1:
        what = f"job id {wanted!r} is ambiguous" if found else f"job {wanted!r} not found on this cluster"
        newest = ", ".join(one.id for one in (found or jobs)[-_NEWEST:])
        some = "the newest jobs" if len(found or jobs) > _NEWEST else "jobs"
        kind = CloudDDPError if found else UnknownJob
        raise kind(what, hint=f"{some}: {newest}; `cloudddp jobs` lists all")
    return found[0]


def find_job(runner: Runner, wanted: str | None) -> JobRecord:
    """As `find`, of the jobs that the nodes have recorded. Raises NodeError, too."""
    return find(list_jobs(runner), wanted)
