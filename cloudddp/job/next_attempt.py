"""What to do next about a job that has ended, or that another command may continue;
operations/continuation.py does it, looks again, and calls again. Commands differ in their `Policy` only.
Restarts in place are decided by the nodes (infra/node/agent/gang/decision.py). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from cloudddp.config import timing
from cloudddp.config.spec import JobSpec
from cloudddp.errors import Message, q
from cloudddp.formats import duration, plural
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.outcome import JobStatus
from cloudddp.job.status import JobRecord
from cloudddp.text import node_list

_FAILED = (JobStatus.FAILED, JobStatus.LOST, JobStatus.PREEMPTED)
_BUSY = 5.0  # seconds: a command that only looks at the jobs holds the lock for a moment


@dataclass(frozen=True, slots=True)
class Policy:
    """`waits`: follow the job, wait for other commands and for nodes that may be rebooting, and start the job
    again only if it has failed with a node. Otherwise start it again after any failure, at once."""

    times: int  # attempts that are left
    waits: bool
    replaced: frozenset[int] = frozenset()  # nodes to replace although they run
    nodes_min: int | None = None  # the job may go on with so many nodes
    silence: float = 0.0  # seconds in which a silent node may answer again, or have ended
    unlisted: float = 0.0  # seconds that EC2 may take to list that an instance has ended
    unnoticed: float = 0.0  # seconds in which the nodes that are left may not have noticed a loss

    @classmethod
    def of(cls, job: JobSpec, times: int, *, waits: bool, replaced: Collection[int] = ()) -> Policy:
        limits = timing.current()
        silence = limits.offline if waits else limits.quiet
        unnoticed = job.heartbeat + job.stop_grace + limits.quiet
        return cls(times, waits, frozenset(replaced), job.nodes_min, silence, limits.quiet, unnoticed)


@dataclass(frozen=True, slots=True)
class Seen:
    """A job and its nodes, by node rank, as AWS and SSH show them."""

    cluster: str = ""  # its name
    busy: bool = False  # another command of this computer resumes a job of the cluster
    job: JobRecord | None = None  # as the nodes have recorded it; None: they do not know it
    later: JobRecord | None = None  # the job that continues it
    nodes: frozenset[int] = frozenset()  # that the cluster has
    known: bool = True  # some of them have run the job
    gone: bool = False  # an instance that has run it, or that the last attempt had, has ended
    silent: Mapping[int, str] = field(default_factory=dict)  # EC2 says that they run; why they do not answer
    announced: bool = False  # AWS has announced the end of a node, which has ended the job
    ending: frozenset[int] = frozenset()  # the node that is about to end
    shortage: str = ""  # why a node that was lost cannot be replaced
    broken: bool = False  # a connection has broken in the last attempt to start the job
    waited: float = 0.0  # seconds since the first look


class Do(Enum):
    """What to do."""

    LOOK = auto()  # ask AWS and the nodes
    FINISH = auto()  # the job has ended, and is not started again
    WAIT = auto()  # look again in a moment, for an end that EC2 or the nodes have not noticed yet
    WAIT_FOR_COMMAND = auto()  # which resumes a job of the cluster
    FOLLOW = auto()  # a job to its end: the one that runs, or that another command has started
    START = auto()  # replace what is lost, and the nodes `replaced`, and start the job again
    START_ON_FEWER = auto()  # on the nodes that there are
    GIVE_UP = auto()


# Why a job is not started again.
Reason = Enum("Reason", "BUSY RESUMED REMOVED SILENT NOT_STARTED SUCCEEDED RUNNING NO_CAPACITY BROKEN")


@dataclass(frozen=True, slots=True)
class NextMove:
    """`text`: what to report; for GIVE_UP the error, with its `hint`."""

    do: Do
    text: str = ""
    job: str = ""
    replaced: frozenset[int] = frozenset()
    reason: Reason | None = None
    hint: str = ""


def _give_up(reason: Reason, text: str, hint: str = "") -> NextMove:
    return NextMove(Do.GIVE_UP, text, reason=reason, hint=Message(hint))


def next_attempt(job_id: str, result: JobResult | None, seen: Seen | None, policy: Policy) -> NextMove:
    """Return the next action. `result`: how the job has ended, where it was followed; `seen` None: before a
    look, which is not needed where the job cannot be started again."""
    if seen is None:
        over = result is not None and result.status not in _FAILED
        to_follow = policy.waits and result is None
        return NextMove(Do.FINISH if over or not (policy.times or to_follow) else Do.LOOK)
    if seen.busy and policy.waits:
        text = "waiting for another cloudddp command, which resumes a job of this cluster"
        return NextMove(Do.WAIT_FOR_COMMAND, text)
    if seen.busy and seen.waited < _BUSY:
        return NextMove(Do.WAIT)
    if seen.busy:
        text = f"another cloudddp command is resuming a job of cluster {seen.cluster!r}"
        return _give_up(Reason.BUSY, text, "`cloudddp jobs` lists it once it has started")
    if seen.later is not None and policy.waits:
        return NextMove(Do.FOLLOW, job=seen.later.id)
    if (later := seen.later) is not None:
        words = ("resume",) if later.status.ended else ("logs", "-f")
        text = f"job {job_id} was resumed before, as {later.id} ({later.status})"
        return _give_up(Reason.RESUMED, text, f"`cloudddp {q(*words, later.id)}`")
    if not seen.nodes and result is not None:
        return NextMove(Do.FINISH)
    if not seen.nodes:
        text = f"no node of cluster {seen.cluster!r} is left"
        return _give_up(Reason.REMOVED, text, "`cloudddp up` creates it again")
    if policy.waits and result is None:
        return _not_started(job_id) if seen.job is None else NextMove(Do.FOLLOW, job=job_id)
    return (
        (_without_loss(result, seen, policy) if policy.waits and result is not None else None)
        or _not_yet(job_id, seen, policy)
        or _start(result, seen, policy)
    )


def _not_started(job_id: str) -> NextMove:
    text = f"job {job_id} was not started on any node that is left, so there is nothing to resume"
    return _give_up(Reason.NOT_STARTED, text, "`cloudddp jobs` lists those that were")


def _without_loss(result: JobResult, seen: Seen, policy: Policy) -> NextMove | None:
    """Return what to do unless a node has ended, is about to end, or was rebooted while the job ran."""
    if not seen.broken and result.leaving is not None and result.leaving not in result.lost:
        return None if seen.announced else NextMove(Do.FINISH)
    if not seen.broken and (result.rebooted or (seen.job is not None and seen.job.rebooted)):
        return None
    if seen.gone:
        return None
    if seen.silent and seen.waited < policy.silence:
        text = f"{node_list(seen.silent)} may be rebooting: waiting until it responds, or has ended"
        return NextMove(Do.WAIT, text)
    if (seen.broken or result.doubtful) and seen.waited < policy.unlisted:
        return NextMove(Do.WAIT)
    if seen.broken:
        return _give_up(Reason.BROKEN, f"job {result.job} was not started again")
    return NextMove(Do.FINISH)


def _not_yet(job_id: str, seen: Seen, policy: Policy) -> NextMove | None:
    """Return what to do while the job cannot be started again."""
    if seen.silent and seen.waited < policy.silence:
        return NextMove(Do.WAIT)
    if seen.silent:
        words = [word for node in sorted(seen.silent) for word in ("--replace", str(node))]
        verbs = "runs, and it does" if len(seen.silent) == 1 else "run, and they do"
        text = f"EC2 says that {node_list(seen.silent)} {verbs} not answer: "
        hint = f"`cloudddp resume {q(*words)}` terminates it first and launches another"
        return _give_up(Reason.SILENT, text + "; ".join(seen.silent.values()), hint)
    if seen.job is None and seen.known:
        return _not_started(job_id)
    if seen.job is not None and seen.job.status is JobStatus.SUCCEEDED:
        text = f"job {job_id} has succeeded: there is nothing to resume"
        return _give_up(Reason.SUCCEEDED, text, "start it again with `cloudddp launch SCRIPT`")
    if seen.job is None or seen.job.status.ended:
        return None
    if (seen.gone or policy.replaced) and seen.waited < policy.unnoticed:
        limit = duration(policy.unnoticed)
        text = f"waiting for job {job_id} to end on the nodes that are left, for up to {limit}"
        return NextMove(Do.WAIT, text)
    hint = f"`cloudddp logs -f {q(job_id)}` follows it, `cloudddp cancel {q(job_id)}` ends it"
    return _give_up(Reason.RUNNING, f"job {job_id} is still running", hint)


def _start(result: JobResult | None, seen: Seen, policy: Policy) -> NextMove:
    if seen.shortage:
        left = plural(len(seen.nodes), "node")
        if policy.nodes_min is not None and len(seen.nodes) >= policy.nodes_min:
            return NextMove(Do.START_ON_FEWER, f"{seen.shortage}: going on with {left}")
        hint = (
            "keep trying: `cloudddp resume --wait-capacity 2h`; or go on with fewer nodes: `cloudddp resume "
            f"--nodes-min {q(len(seen.nodes))}`"
        )
        return _give_up(Reason.NO_CAPACITY, f"{seen.shortage}; {left} left", hint)
    why = ""
    if seen.broken:
        why = "another node was lost; resuming it again"
    elif result is not None:
        why = f"job {result.job} has lost a node; resuming it"
        if result.leaving is not None and result.leaving not in result.lost:
            why = f"job {result.job} is about to lose node {result.leaving}; resuming it"
        elif result.rebooted:
            nodes = node_list(result.rebooted)
            why = f"job {result.job} ended with the reboot of {nodes}; resuming it"
    return NextMove(Do.START, why, replaced=(policy.replaced & seen.nodes) | seen.ending)
