"""`watch`, and launches with `--retries`: a job that loses a node, or whose node is rebooted, is resumed, as
often as that happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from cloudddp.cli import session as sessions
from cloudddp.cli.actions import planned_end
from cloudddp.cli.actions.follow import (
    line_printer,
    quiet_reporter,
    report_end,
    silence_reporter,
)
from cloudddp.cli.actions.resume import Busy, Request, Resumed, as_launched, awaited_ends, resume_job
from cloudddp.cli.actions.start_job import pull_before_the_end
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster import connect, lookup
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import AWSError, NodeError
from cloudddp.job import launch_record, status
from cloudddp.job.follow.decide import Policy
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.launch_record import LaunchRecord
from cloudddp.job.outcome import JobStatus
from cloudddp.job.poweroff import PutOff
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import deadlines
from cloudddp.operations.results import ended_nodes_query
from cloudddp.text import node_list

_AGAIN = 1.0  # seconds between two looks
_LIST_SECONDS = 15.0  # for a node to list its jobs: it may have been lost meanwhile
_FAILED = (JobStatus.FAILED, JobStatus.LOST, JobStatus.PREEMPTED)


def watch(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    job_id: str | None,
    times: int,
    variables: Sequence[str],
    env_files: Sequence[str],
) -> int:
    session = sessions.start(console, options, flags=flags, variables=variables, env_files=env_files)
    cluster = session.cluster()
    record = launch_record.find(ClusterFolder(cluster.id), job_id)
    as_launched(session, flags, record, cluster)  # a value that is missing is reported now, not after a loss
    while True:
        put_off = PutOff()
        with planned_end.restored_after_failure(session, cluster, put_off) as least:
            job, finished = _followed(session, cluster, record.job, put_off)
            record = launch_record.find(ClusterFolder(cluster.id), job)
            if not times or not _lost_node(session, cluster, record, finished):
                planned_end.restore(session, cluster, put_off, least)
                return finished.exit_code
        times -= 1
        console.log(f"{_loss(finished)}; resuming it")
        try:
            times, _ = _resume(session, flags, Request(job, detach=True, suggest=False), times, put_off)
        except Busy:
            _wait_for_other(console, ClusterFolder(cluster.id))
            times += 1
        except Resumed as done:
            job = done.job
        record = launch_record.find(ClusterFolder(cluster.id), job)


def _loss(finished: JobResult) -> str:
    if finished.leaving is not None and finished.leaving not in finished.lost:
        return f"job {finished.job} is about to lose node {finished.leaving}"
    if finished.rebooted:
        return f"job {finished.job} ended with the reboot of {node_list(finished.rebooted)}"
    return f"job {finished.job} has lost a node"


def keep_resuming(
    session: Session, cluster: Cluster, finished: JobResult, times: int, *, suggest: bool = True
) -> JobResult:
    """Resume a job that was followed, as often as it loses a node, at most `times`; return how it ended.
    `suggest` as in `start_and_follow`."""
    folder = ClusterFolder(cluster.id)
    while times and _lost_node(session, cluster, launch_record.find(folder, finished.job), finished):
        times -= 1
        session.console.log(f"{_loss(finished)}; resuming it")
        try:
            times, again = _resume(session, (), Request(finished.job, suggest=suggest), times)
        except Busy:
            _wait_for_other(session.console, folder)
            times += 1
            continue
        except Resumed as done:  # by another command, such as `watch`
            _, again = _followed(session, cluster, done.job, PutOff())
        if again is None:
            break
        finished = again
    return finished


def _resume(
    session: Session, flags: Sequence[Flag], wanted: Request, times: int, put_off: PutOff | None = None
) -> tuple[int, JobResult | None]:
    """As `resume_job`, again if a further node is lost meanwhile, at most `times` more; return how many are
    left, too."""
    while True:
        before = session.cluster()
        try:
            return times, resume_job(session, flags, wanted, put_off)
        except NodeError as error:
            if not times or not awaited_ends(session, before, before.nodes, least=1):
                raise
            session.console.warn(error.message)
        times -= 1
        session.console.log("another node was lost; resuming it again")


class _Resuming(Exception):
    """Another command starts a job again, or has done so: not all nodes of that job (the argument) were
    looked at."""


def _is_resuming(folder: ClusterFolder) -> bool:
    with folder.resuming() as free:
        return not free


def _wait_for_other(console: Console, folder: ClusterFolder) -> None:
    """Wait until no other command of this computer is resuming a job of the cluster."""
    if _is_resuming(folder):
        console.log("waiting for another cloudddp command, which resumes a job of this cluster")
    while _is_resuming(folder):
        time.sleep(_AGAIN)


def _followed(session: Session, cluster: Cluster, job_id: str, put_off: PutOff) -> tuple[str, JobResult]:
    """As `_watched`; repeat it while nodes do not answer, since one may be lost at any moment."""
    folder, deadline = ClusterFolder(cluster.id), time.monotonic() + timing.current().offline
    while True:
        _wait_for_other(session.console, folder)
        try:
            return _watched(session, folder, job_id, put_off)
        except _Resuming as again:
            (job_id,) = again.args
            continue
        except (NodeError, AWSError) as error:
            permanent = isinstance(error, AWSError) and not error.transient
            if permanent or time.monotonic() > deadline:
                raise
            session.console.warn(error.message)
        time.sleep(timing.current().reconnect)


def _watched(session: Session, folder: ClusterFolder, job_id: str, put_off: PutOff) -> tuple[str, JobResult]:
    """Follow a job, or the one that continues it, to its end. Return its id, and how it ended. Where it has
    failed, the planned end of its nodes is put off. Raises _Resuming."""
    console, cluster = session.console, session.cluster()
    runner, silent = connect.connect_reachable(cluster, session.settings.cluster, progress=console.log)
    with closing(runner):
        for error in silent.values():
            console.warn(str(error))
        jobs = status.list_jobs(runner, seconds=max(session.settings.job.heartbeat, _LIST_SECONDS))
        if later := [one.id for one in jobs if one.resumed_from == job_id]:
            raise _Resuming(later[-1])
        job = status.find(jobs, job_id)
        if not job.status.ended and _is_resuming(folder):
            raise _Resuming(job_id)
        follower = JobFollower(
            runner,
            job.id,
            job.nodes,
            Policy(wait=True),
            on_line=line_printer(console),
            on_quiet=quiet_reporter(console),
            on_silence=silence_reporter(console, job.id),
            ended_instances=ended_nodes_query(session.aws, cluster),
        )
        with closing(follower):
            finished = follower.run()
        if job.poweroff is not None and finished.status in _FAILED:  # until it is resumed, if it is
            planned_end.put_off_for_check(put_off, runner)
        report_end(session, runner, cluster, finished)
        if finished.leaving is not None:
            pull_before_the_end(session, runner, cluster, finished)
    return job_id, finished


def _lost_node(session: Session, cluster: Cluster, record: LaunchRecord, finished: JobResult) -> bool:
    """Return whether the job has failed, and an instance on which it ran has ended, or was rebooted. EC2 may
    take a while to notice the one, and a node to start again after the other."""
    if finished.status not in _FAILED:
        return False
    if finished.leaving is not None and finished.leaving not in finished.lost:
        return deadlines.announced_by_aws(cluster, session.settings, time.time())
    if finished.rebooted:
        return True
    silent, began = {*finished.lost, *finished.unverified}, time.monotonic()
    if silent:
        session.console.log(f"{node_list(silent)} may be rebooting: waiting until it responds, or has ended")
    while True:
        found = lookup.refresh(session.aws(), cluster.name, cluster.id)
        live = {node.id for node in found.nodes.values()} if found else set()
        if live and set(record.nodes) - live:
            return True
        if silent and found is not None:
            rebooted, silent = _after_silence(session.settings.cluster, found, record.job, silent)
            if rebooted:
                return True
        limit = timing.current().offline if silent else timing.current().quiet if finished.doubtful else 0.0
        if not live or time.monotonic() > began + limit:
            return False
        time.sleep(_AGAIN)


def _after_silence(
    spec: ClusterSpec, cluster: Cluster, job_id: str, silent: set[int]
) -> tuple[bool, set[int]]:
    """Return whether a node was rebooted while the job ran, and which of the nodes that were silent do not
    respond yet."""
    broken: dict[int, NodeError] = {}
    try:
        runner, errors = connect.connect_reachable(cluster, spec)
        with closing(runner):
            jobs = status.list_jobs(runner, silent=broken, seconds=_LIST_SECONDS)
    except NodeError:
        return False, silent
    rebooted = any(one.id == job_id and one.rebooted for one in jobs)
    return rebooted, silent & (errors.keys() | broken.keys())
