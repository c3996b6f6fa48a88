"""`resume`: replaces lost nodes, and starts a job again."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.checkpoints import refusal
from cloudddp.cli import session as sessions
from cloudddp.cli.actions import planned_end
from cloudddp.cli.actions.follow import (
    Detached,
    JobStopped,
)
from cloudddp.cli.actions.start_job import start_and_follow
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster import connect, lookup
from cloudddp.cluster import replace_nodes as replacing
from cloudddp.cluster.launch_errors import NotLaunched
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import (
    EXIT_LEFTOVERS,
    AWSError,
    CloudDDPError,
    Interrupted,
    Message,
    NodeError,
    UsageError,
    q,
)
from cloudddp.formats import counted, duration
from cloudddp.job import launch, launch_record, poweroff, status
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import LaunchRecord
from cloudddp.job.outcome import JobStatus
from cloudddp.job.poweroff import PutOff
from cloudddp.job.results import checkpoints, new_files
from cloudddp.job.status import JobRecord
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import deadlines
from cloudddp.operations.node_connections import cause_named
from cloudddp.operations.results import report_lost
from cloudddp.operations.start_job import check_nodes_min
from cloudddp.text import node_list, one_line

_AGAIN = 1.0  # seconds between two looks
_LOCK_ATTEMPTS, _LOCK_PAUSE = 3, 0.05  # seconds
_NOTICE_MINUTES = 15  # after the end of a job in which the node that was announced to end is replaced


@dataclass(frozen=True, slots=True)
class Request:
    """What to resume. `replaced` are nodes to replace although EC2 says that they run; `suggest` as in
    `start_and_follow`."""

    job: str | None
    replaced: frozenset[int] = frozenset()
    detach: bool = False
    suggest: bool = True
    more: tuple[str, ...] = ()  # arguments of the script, after those that it had


def resume(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    job_id: str | None,
    detach: bool,
    yes: bool,
    replaced: Sequence[str],
    variables: Sequence[str],
    env_files: Sequence[str],
    more: Sequence[str],
) -> int:
    nodes, console.yes = frozenset(map(_node, replaced)), yes
    session = sessions.start(console, options, flags=flags, variables=variables, env_files=env_files)
    try:
        finished = resume_job(session, flags, Request(job_id, nodes, detach, more=tuple(more)))
    except (JobStopped, Detached) as ended:
        return _left(console, ended)
    return 0 if finished is None else finished.exit_code


class Busy(CloudDDPError):
    """Another command of this computer resumes a job of the cluster."""


class NotReplaced(CloudDDPError):
    """There is no capacity for a node that was lost."""


class Resumed(CloudDDPError):
    """The job was resumed before, as `job`."""

    def __init__(self, before: str, job: JobRecord) -> None:
        follow = (
            Message(f"`cloudddp logs -f {q(job.id)}`")
            if not job.status.ended
            else Message(f"`cloudddp resume {q(job.id)}`")
        )
        super().__init__(f"job {before} was resumed before, as {job.id} ({job.status})", hint=follow)
        self.job = job.id


def _node(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5):
        raise UsageError(f"--replace {text!r} is not a node", hint="give a node rank, as in --replace 1")
    return int(text)


def _left(console: Console, ended: JobStopped | Detached) -> int:
    if isinstance(ended, Detached):
        console.suggest(f"job {ended.job_id} keeps running: `cloudddp logs -f {q(ended.job_id)}` follows it")
        return EXIT_LEFTOVERS
    raise Interrupted(f"{ended}; the cluster is still up", hint="`cloudddp down` stops the bill") from None


# -- resuming ----------------------------------------------------------------------------------------------


def resume_job(
    session: Session, flags: Sequence[Flag], wanted: Request, put_off: PutOff | None = None
) -> JobResult | None:
    """Replace what is lost, and start the job again; follow it unless it is to be detached. `put_off`: what
    the caller has put off for it, and restores if this fails."""
    cluster = session.cluster()
    put_off = PutOff() if put_off is None else put_off
    folder = ClusterFolder(cluster.id)
    record = launch_record.find(folder, wanted.job)
    own = as_launched(session, flags, record, cluster)
    _check_replaced(cluster, wanted.replaced)
    with ExitStack() as lock:
        _lock(lock, folder, cluster)
        least = lock.enter_context(planned_end.restored_after_failure(own, cluster, put_off))
        replaced = _check_job(own, cluster, record, wanted.replaced, put_off, lock)
        if record.poweroff is not None:  # whoever reads of a failure needs time to do something
            least[record.job] = poweroff.keep_after_failure(record.poweroff)
        cluster = _restored(own, cluster, replaced)
        if not {node.id for node in cluster.nodes.values()}.intersection(record.nodes):
            own.console.warn(
                f"no node that job {record.job} ran on is left: the script begins where it finds a snapshot "
                "elsewhere"
            )
        own = replace(own, settings=_for_nodes(own.settings, cluster))
        script = replace(record.script, args=(*record.script.args, *wanted.more))
        job = NewJob(script, record.poweroff, record.job, record.keep)
        own.console.log(f"resuming job {record.job} as {job.id} on {counted(len(cluster.nodes), 'node')}")
        with (
            cause_named(own, cluster),
            closing(connect.connect(cluster, own.settings.cluster, progress=own.console.log)) as runner,
        ):
            return start_and_follow(
                own, runner, cluster, job, detach=wanted.detach, suggest=wanted.suggest, on_start=lock.close
            )


def _lock(stack: ExitStack, folder: ClusterFolder, cluster: Cluster) -> None:
    """Take the lock of `folder.resuming` for the time of the stack. Raises Busy."""
    for _ in range(_LOCK_ATTEMPTS):  # `watch` looks whether it is free, which takes it for a moment
        attempt = ExitStack()
        if attempt.enter_context(folder.resuming()):
            stack.push(attempt.pop_all())
            return
        attempt.close()
        time.sleep(_LOCK_PAUSE)
    raise Busy(
        f"another cloudddp command is resuming a job of cluster {cluster.name!r}",
        hint="`cloudddp jobs` lists it once it has started",
    )


def as_launched(session: Session, flags: Sequence[Flag], record: LaunchRecord, cluster: Cluster) -> Session:
    """Return a session with the settings of a job when it was launched; `flags` of this command override
    them.

    Raises UsageError for what the job needs and is not there any more: a variable, the script, the project.
    """
    job = launch_record.job_again(record, session.variables, session.env_files, os.environ)
    now, given = session.settings, {flag.key for flag in flags}
    least = now.job.nodes_min if "nodes_min" in given else record.config.job.nodes_min
    wait = now.cluster.wait_capacity if "wait_capacity" in given else record.config.cluster.wait_capacity
    settings = msgspec.structs.replace(
        record.config,
        job=msgspec.structs.replace(job, nodes_min=least),
        cluster=msgspec.structs.replace(
            record.config.cluster, name=cluster.name, wait_capacity=wait, ssh_port=now.cluster.ssh_port
        ),
    )
    root = Path(record.root)
    if not root.is_dir():
        raise UsageError(
            f"the project of job {record.job} is gone: {root} is not a folder", hint="restore it"
        )
    launch.prepare(root, root, record.script, settings)
    explicit = {one.partition("=")[0] for one in session.variables}
    own = replace(
        session,
        settings=settings,
        root=root,
        files=tuple(map(Path, record.files)),
        variables=(*(name for name in record.passed if name not in explicit), *session.variables),
        env_files=session.env_files or record.env_files,
    )
    check_nodes_min(settings, len(cluster.nodes) + cluster.missing)
    return own


def _check_replaced(cluster: Cluster, replaced: frozenset[int]) -> None:
    """Raise UsageError for a node that the cluster does not have."""
    count = len(cluster.nodes) + cluster.missing
    for node in sorted(replaced):
        if node >= count:
            raise UsageError(
                f"--replace {node}: the cluster has no such node", hint=f"its nodes are 0 to {count - 1}"
            )
    if replaced and not set(cluster.nodes) - replaced:
        raise UsageError(
            "--replace names every node that is left, and a replacement needs one that stays",
            hint="`cloudddp down` and `cloudddp up` replace them all",
        )


def _check_job(
    session: Session,
    cluster: Cluster,
    record: LaunchRecord,
    replaced: frozenset[int],
    put_off: PutOff,
    stack: ExitStack,
) -> frozenset[int]:
    """Wait until the job has ended on the nodes that stay; return which nodes are to be replaced, with one
    that is about to end. What is planned there is put off until it can be resumed, and the connections
    stay open as long as the stack: an idle node would end while others are waited for. Raises
    CloudDDPError if it runs, has succeeded or was resumed before; NodeError if a node that EC2 says runs
    does not answer, and is not to be replaced."""
    stay = cluster.only([node.id for rank, node in cluster.nodes.items() if rank not in replaced])
    for rank in stay.nodes:
        stay.require_running(rank)
    new = [rank for rank, node in stay.nodes.items() if node.id not in record.nodes]
    known = stay.only([node.id for rank, node in stay.nodes.items() if rank not in new])
    runner, silent = connect.connect_reachable(
        known if known.nodes else stay, session.settings.cluster, progress=session.console.log
    )
    stack.enter_context(closing(runner))
    # Before anything else: the nodes of a job that was launched with --down may be about to power off.
    planned_end.put_off_for_check(put_off, runner, _check_seconds(session.settings.job))
    ended = awaited_ends(session, cluster, silent) if silent else frozenset[int]()
    silent = {node: error for node, error in silent.items() if node not in ended}
    if silent:
        found = lookup.status_problems(session.aws(), cluster, silent)
        more = "".join(f"; node {node}: {text}" for node, text in found.items())
        raise NodeError(
            f"EC2 says that {node_list(silent)} runs, and it does not answer: {silent[min(silent)]}{more}",
            hint=_replace_hint(list(silent)),
        )
    lost = set(record.nodes) - {node.id for rank, node in stay.nodes.items() if rank not in ended}
    seconds = _check_seconds(session.settings.job) if lost else 0.0
    job = _check_ended(session.console, runner, record, seconds, has_run=bool(known.nodes))
    replaced |= _about_to_end(session, cluster, record, job)
    _check_replaced(cluster, replaced)
    _check_files(session, runner, cluster, replaced)
    planned_end.put_off_for_replacement(put_off, session.settings.cluster, runner, cluster, record.keep)
    return replaced


def _check_files(session: Session, runner: Runner, cluster: Cluster, replaced: frozenset[int]) -> None:
    """Report which files the nodes that stay do not have, before others are bought. Raises CloudDDPError for
    an incomplete checkpoint: a script would load it, or begin without it."""
    found = new_files.find_all(runner, session.settings.job).values
    replies = {node: reply for node, reply in found.items() if node not in replaced}
    report_lost(session.console, replies)
    known = checkpoints.on(replies, replies)
    if blocking := known.blocking(range(len(cluster.nodes) + cluster.missing)):
        raise CloudDDPError(
            f"{one_line(refusal(blocking[0], known.problems), 1000)}. No job was started",
            hint="`cloudddp pull --all-nodes` copies what there is of it. Then `cloudddp exec -- rm -rf "
            f"{q(blocking[0])}` removes it, and `cloudddp resume` begins with what is left",
        )


def awaited_ends(
    session: Session, cluster: Cluster, nodes: Collection[int], least: int | None = None
) -> frozenset[int]:
    """Return the nodes of these whose instances have ended. EC2 may take a while to notice: it is asked until
    so many of them have (all), or for Timing.quiet seconds."""
    deadline = time.monotonic() + timing.current().quiet
    while True:
        ended = frozenset(lookup.ended_nodes(session.aws(), cluster, nodes))
        if len(ended) >= (len(nodes) if least is None else least) or time.monotonic() > deadline:
            return ended
        time.sleep(_AGAIN)


def _check_seconds(job: JobSpec) -> float:
    """Return how long `_check_ended` may take."""
    return job.heartbeat + job.stop_grace + timing.current().quiet


def _replace_hint(nodes: Sequence[int]) -> str:
    words = [word for node in nodes for word in ("--replace", str(node))]
    return Message(f"`cloudddp resume {q(*words)}` terminates it first and launches another")


def _about_to_end(
    session: Session, cluster: Cluster, record: LaunchRecord, job: JobRecord | None
) -> frozenset[int]:
    """Return the node that AWS was about to end when the job ended, minutes ago, and that is still there."""
    if job is None or job.leaving is None or job.leaving not in cluster.nodes or job.ended is None:
        return frozenset()
    recent = time.time() - job.ended < _NOTICE_MINUTES * timing.current().minute
    same = cluster.nodes[job.leaving].id in record.nodes
    if not (recent and same and deadlines.announced_by_aws(cluster, session.settings, job.ended)):
        return frozenset()
    session.console.log(f"node {job.leaving} is about to end: it is replaced now")
    return frozenset((job.leaving,))


def _check_ended(
    console: Console, runner: Runner, record: LaunchRecord, seconds: float, *, has_run: bool
) -> JobRecord | None:
    """Wait for up to `seconds`: the nodes that are left may not have noticed yet that one is lost. `has_run`:
    nodes are left that the job was launched on."""
    limit, reported = time.monotonic() + seconds, False
    while True:
        jobs = status.list_jobs(runner)
        if later := [one for one in jobs if one.resumed_from == record.job]:
            raise Resumed(record.job, later[-1])
        job = next((one for one in jobs if one.id == record.job), None)
        if job is None and has_run:
            raise CloudDDPError(
                f"job {record.job} was not started on any node that is left, so there is nothing to resume",
                hint="`cloudddp jobs` lists those that were",
            )
        if job is None:
            return None
        if job.status is JobStatus.SUCCEEDED:
            raise CloudDDPError(
                f"job {job.id} has succeeded: there is nothing to resume",
                hint="start it again with `cloudddp launch SCRIPT`",
            )
        if job.status.ended:
            return job
        if time.monotonic() >= limit:
            raise CloudDDPError(
                f"job {job.id} is still running",
                hint=f"`cloudddp logs -f {q(job.id)}` follows it, `cloudddp cancel {q(job.id)}` ends it",
            )
        if not reported:
            console.log(
                f"waiting for job {job.id} to end on the nodes that are left, for up to {duration(seconds)}"
            )
            reported = True
        time.sleep(_AGAIN)


def _restored(session: Session, cluster: Cluster, replaced: frozenset[int]) -> Cluster:
    """Return the cluster with new nodes for the lost ones; without them where there is no capacity and the
    job may go on."""
    console, spec = session.console, session.settings.cluster
    with console.progress() as progress:
        aws = session.aws()
        replacing.terminate(aws, cluster, sorted(replaced), progress)
        cluster = lookup.refresh(aws, cluster.name, cluster.id) or cluster
        try:
            return replacing.replace_lost(aws, cluster, spec, progress)
        except NotLaunched as failure:
            left = lookup.refresh(aws, cluster.name, cluster.id) or cluster
            least = session.settings.job.nodes_min
            if least is None or len(left.nodes) < least:
                raise NotReplaced(
                    f"{node_list(replacing.missing_ranks(left))} could not be replaced: {failure.message}; "
                    f"{counted(len(left.nodes), 'node')} left",
                    hint="keep trying: `cloudddp resume --wait-capacity 2h`; or go on with fewer nodes: "
                    f"`cloudddp resume --nodes-min {q(len(left.nodes))}`",
                ) from None
            console.warn(f"{failure.message}: going on with {counted(len(left.nodes), 'node')}")
            return left
        except AWSError:
            found = lookup.refresh(aws, cluster.name, cluster.id)
            if found is None or not found.nodes:
                raise CloudDDPError(
                    f"cluster {cluster.name!r} was removed while a node of it was being replaced",
                    hint="`cloudddp up` creates it again",
                ) from None
            raise


def _for_nodes(config: Config, cluster: Cluster) -> Config:
    """Return the settings for the nodes that the cluster has now: a list with a number per node may be too
    long."""
    counts = config.job.nproc_per_node
    if not isinstance(counts, tuple) or len(counts) <= len(cluster.nodes):
        return config
    kept = tuple(counts[node] for node in cluster.nodes if node < len(counts))
    return msgspec.structs.replace(config, job=msgspec.structs.replace(config.job, nproc_per_node=kept))
