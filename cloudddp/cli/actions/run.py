"""`run`: up, launch, pull and down in one command. The cluster is removed after failures, too."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cli import session as sessions
from cloudddp.cli.actions import resume, watch
from cloudddp.cli.actions.follow import Detached, JobStopped, foreground, report_end
from cloudddp.cli.actions.start_job import start_and_follow, stopped_if_interrupted
from cloudddp.cli.actions.up import bring_up
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import connect, region_search, teardown
from cloudddp.cluster.extend import deadline
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.config import timing
from cloudddp.config.command_line import Flag, GlobalOptions, variable_flags
from cloudddp.config.spec import ClusterSpec, Config
from cloudddp.errors import (
    CloudDDPError,
    Interrupted,
    Leftovers,
    Message,
    UsageError,
    ignore_progress,
    q,
    renewal_first,
)
from cloudddp.formats import counted, credentials_end, dollars, duration, moment, toml
from cloudddp.job import cancel, launch_record, poweroff, project_files
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.results import pull
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import process_nodes
from cloudddp.operations.lifecycle import take_down
from cloudddp.operations.node_connections import connected
from cloudddp.operations.results import Left, collect, ended_nodes
from cloudddp.operations.start_job import (
    checked_script,
    report_results_here,
    results_of,
    send_files,
    start_job,
)
from cloudddp.text import node_list, one_line

_TO_REPEAT = timedelta(minutes=5)
_UNCHECKED = Left(
    ("the nodes were not checked, so their files are unknown",), Message("`cloudddp pull --all-nodes`")
)


@dataclass(slots=True)
class _Ending:
    """What has to be removed, how the job ended and which files the nodes still hold: this decides whether
    the nodes may be terminated."""

    discard: bool
    keep: float | None = None  # minutes for which the nodes stay after a job that has failed
    keep_files: float = 60.0  # minutes for which nodes stay that hold files
    results: Sequence[Path] = ()  # of earlier jobs, to put on the nodes
    job: str = ""
    cluster: Cluster | None = None  # None until `run` has to remove it
    started: bool = False  # the job may have written files
    finished: JobResult | None = None
    detached: str = ""  # the job that the user has left running
    left: Left | None = None  # None until the nodes have been checked

    def take(self, cluster: Cluster) -> None:
        """Take over a cluster that is ready."""
        self.cluster = cluster

    @property
    def unknown(self) -> bool:
        return self.finished is not None and self.finished.status == "unknown"

    @property
    def stays(self) -> bool:
        """Whether the nodes stay for a while, because the job has failed."""
        return self.keep is not None and self.finished is not None and self.finished.exit_code != 0

    @property
    def held(self) -> Left:
        """What the nodes hold, as far as it is known."""
        return self.left or (_UNCHECKED if self.started else Left())


def run(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    yes: bool,
    detach: bool,
    discard: bool,
    keep: float | None,
    keep_files: float,
    put_back: bool,
    job_id: str | None,
    module: bool,
    variables: Sequence[str],
    env_files: Sequence[str],
    script: str,
    args: Sequence[str],
) -> int:
    flags = [*flags, *variable_flags(variables, env_files, os.environ)]
    session = sessions.start(console, options, flags=flags, variables=variables, env_files=env_files)
    wanted = checked_script(session, Script(script, tuple(args), module), fresh=True)
    process_nodes.check(session.settings)
    pull.check_target(
        session.root / project_files.RESULTS, hint="make it a folder that you can write to, or remove it"
    )
    results = results_of(session, put_back and (job_id or True))
    if detach:
        if discard or keep is not None:
            raise UsageError(
                "-d excludes --discard and --keep-on-failure: the nodes end by themselves",
                hint="leave them out",
            )
        process_nodes.refuse(
            "run -d needs nodes that power off by themselves; the simulator's process nodes do not",
            Message("leave out -d: `cloudddp run` then removes the nodes itself"),
        )
    _refuse_existing(session)
    if not put_back:
        report_results_here(session, "add --results to this command")
    ending = _Ending(discard, keep, keep_files, results)
    try:
        with signals.interruptible():  # but not the teardown
            bring_up(session, yes=yes, check=partial(_check, yes or detach), on_ready=ending.take)
            if ending.cluster is None:
                raise _exists(session.settings.cluster.name)  # another command has created it in the meantime
            session = replace(session, region=ending.cluster.region)
            if detach:
                _leave_to_the_nodes(session, wanted, ending)
                return 0
            finished = _run_job(session, wanted, ending)
    except JobStopped as stopped:
        raise Interrupted(f"{stopped.outcome}; the cluster is removed") from None
    except Interrupted as stopped:  # its hint would be about a cluster that stays up
        raise Interrupted(stopped.message) from None
    finally:
        if ending.cluster is not None:
            _end(replace(session, region=ending.cluster.region), ending.cluster, ending)
    return finished.exit_code or int(bool(ending.held.incomplete))


def _leave_to_the_nodes(session: Session, script: Script, ending: _Ending) -> None:
    """Start the job, after which the nodes end by themselves; from then on nothing is left to do here."""
    copied = session.settings.job.results_s3 is not None  # the nodes wait for that
    job = NewJob(script, 0.0 if copied else ending.keep_files, keep=ending.keep_files)
    with connected(session) as (cluster, runner):
        if ending.results:
            send_files(session, runner, cluster, ending.results)
        start_and_follow(session, runner, cluster, job, detach=True, nodes_stay=False)
        ending.cluster = None


def _refuse_existing(session: Session) -> None:
    name = session.settings.cluster.name
    if region_search.in_regions(session.looked_in(session.clouds()), name, ignore_progress).of(name):
        raise _exists(name)


def _exists(name: str) -> CloudDDPError:
    return CloudDDPError(
        f"cluster {name!r} already exists; `run` creates and removes a cluster of its own",
        hint="use `cloudddp launch`, or choose another name with -c",
    )


def _check(yes: bool, plans: Sequence[Plan], aws: AWS) -> None:
    """Raise UsageError if the credentials end before the deadline: `run` needs them to remove the cluster."""
    ends, deadline = aws.credentials_end(), max(plan.expires for plan in plans)
    if yes or ends is None or ends >= deadline:
        return
    # Rounded down, and with time to read this, type the command again and confirm it.
    hours = math.floor((ends - datetime.now(UTC) - _TO_REPEAT).total_seconds() / 36) / 100
    shorter = f"`--max-hours {hours:.2f}` for a shorter job, " if hours >= 0.1 else ""
    raise UsageError(
        f"your AWS {credentials_end(ends)}, before the cluster's deadline ({moment(deadline)}): `run` may "
        "be unable to remove the cluster, which then costs money until that deadline. Nothing was created",
        hint=f"{aws.renewal_now}; or {shorter}or --yes to run anyway",
    )


def _run_job(session: Session, script: Script, ending: _Ending) -> JobResult:
    """Run the job to its end, also on other nodes where it has lost one and may be started again; pull its
    results."""
    finished = _run_once(session, script, ending)
    if not session.settings.job.retries or ending.cluster is None:
        return finished
    try:
        times = session.settings.job.retries
        again = watch.keep_resuming(session, ending.cluster, finished, times, suggest=False)
    except Detached as left:
        ending.detached = left.job_id
        raise
    except resume.NotReplaced as failure:
        _collect_again(session, ending, ending.cluster, finished)
        if ending.stays:
            raise
        again_later = f"`cloudddp run --wait-capacity 2h {q(*script.argv)}`"
        hint = Message(f"run it again later, or let it wait for capacity: {again_later}")
        raise CloudDDPError(failure.message, hint=hint) from None
    except (Exception, KeyboardInterrupt):
        _collect_again(session, ending, ending.cluster, finished, interrupted=True)
        raise
    if again is not finished:
        _collect_again(session, ending, ending.cluster, finished, again=again)
    return again


def _collect_again(
    session: Session,
    ending: _Ending,
    cluster: Cluster,
    finished: JobResult,
    *,
    again: JobResult | None = None,
    interrupted: bool = False,
) -> None:
    """Pull the results of the job that continues `finished`, if one was started. `again`: how it has ended.
    `interrupted`: it may still run. The cluster is kept if a node does not answer, since its files are
    unknown."""
    newest = launch_record.find(ClusterFolder(cluster.id), None).job if again is None else again.job
    if newest == finished.job:
        return
    ending.left, ending.job = None, newest
    if again is not None or interrupted:
        ending.finished = again
    with (
        contextlib.suppress(CloudDDPError),
        connected(session, partly=True, needed=()) as (ending.cluster, runner),
    ):
        _collect(session, runner, ending.cluster, newest, ending)


def _run_once(session: Session, script: Script, ending: _Ending) -> JobResult:
    job = NewJob(script, ending.keep)  # the nodes end by themselves also if this computer is lost
    with connected(session) as (cluster, runner):
        if ending.results:
            send_files(session, runner, cluster, ending.results)
        ending.started, ending.job = True, job.id
        try:
            with stopped_if_interrupted(session.console, runner, job.id):
                sending = start_job(session, runner, cluster, job, nodes_stay=False)
                try:
                    ending.finished = foreground(session, runner, cluster, job.id)
                finally:
                    sending.abandon()
            report_end(session, runner, cluster, ending.finished)
        except Detached as left:
            ending.detached = left.job_id
            raise
        finally:
            _collect(session, runner, cluster, job.id, ending)
    return ending.finished


def _collect(session: Session, runner: Runner, cluster: Cluster, job_id: str, ending: _Ending) -> None:
    """Pull results before the nodes are terminated. A job that may still run is ended first."""
    if ending.unknown or ending.detached:
        return
    with signals.protected(lambda: session.console.log("checking the nodes for results first")):
        if ending.finished is None:
            cancel.abort_launch(runner, job_id, grace=session.settings.job.stop_grace)
        ended = ended_nodes(session, cluster, ending.finished)
    ending.left = collect(session, runner, cluster, job_id, ended)


def _end(session: Session, cluster: Cluster, ending: _Ending) -> None:
    """Terminate the nodes, or report which are kept and why. Raises Leftovers, which overrides the job's exit
    code."""
    console = session.console
    with signals.protected(lambda: console.log(teardown.STILL_REMOVING)):
        try:
            if ending.detached:
                _leave_job(cluster, ending.detached)
            elif ending.unknown:
                if _still_live(session.aws(finishing=True), cluster):
                    _leave_running(cluster)
            elif ending.stays:
                _leave_failed(console, cluster, ending)
                return
            elif ending.held.lines:
                _keep(console, session.settings, cluster, ending)
            report = take_down(session, cluster.id)
        except Leftovers:
            raise
        except Exception as error:  # also a bug: the message must name the nodes that may still be running
            ids = ", ".join(node.id for node in cluster.live)
            raise Leftovers(
                f"cannot confirm that {ids} have been terminated; they cost {_price(cluster)} "
                f"until {_deadline(cluster)}: {error}",
                hint=renewal_first(error, "repeat `cloudddp down` until it reports that nothing is left"),
            ) from None
    console.log(lifecycle.down(report, session.settings.cluster.name, simulated=session.options.sim))


def _still_live(aws: AWS, cluster: Cluster) -> bool:
    """Return whether the nodes may still exist; True if AWS cannot be queried."""
    try:
        return any(node.live for node in inventory.instances(aws, inventory.with_id(cluster.id)))
    except CloudDDPError:
        return True


def _leave_running(cluster: Cluster) -> NoReturn:
    """Raise Leftovers: if this computer cannot reach the nodes, the job may still be running, so nothing is
    removed."""
    raise Leftovers(
        f"lost connection to all nodes, so the {counted(len(cluster.nodes), 'node')} were left running; "
        f"they terminate at {_deadline(cluster)}",
        hint="when the network is back: `cloudddp allow-me`, then `cloudddp logs -f`, `cloudddp pull`, "
        "`cloudddp down`",
    )


def _leave_failed(console: Console, cluster: Cluster, ending: _Ending) -> None:
    """Report what happens to the nodes of a job that has failed, with --keep-on-failure."""
    minutes = 60 * (ending.keep or 0.0)
    console.suggest(
        f"the job has failed: its nodes stay for {duration(minutes)} at {_price(cluster)}, and end by "
        "themselves then (--keep-on-failure): `cloudddp ssh`, `cloudddp logs`, `cloudddp pull`; "
        "`cloudddp down` ends them now, and removes what is left"
    )
    for line in ending.held.lines:
        console.warn(f"not pulled: {one_line(line, 1000)}")


def _leave_job(cluster: Cluster, job_id: str) -> NoReturn:
    """Raise Leftovers: the user has detached from the job, which needs the nodes."""
    raise Leftovers(
        f"job {job_id} keeps running; the cluster stays up at "
        f"{_price(cluster)} until its deadline, {_deadline(cluster)}",
        hint=f"`cloudddp logs -f {q(job_id)}`, `cloudddp pull`, `cloudddp down`",
    )


def _keep(console: Console, settings: Config, cluster: Cluster, ending: _Ending) -> None:
    """Raise Leftovers, naming what the nodes hold, how long they stay and what they cost; with `discard`,
    only warn."""
    left, outputs = ending.held, settings.job.outputs
    listed = "".join(f"\n  {one_line(line, 1000)}" for line in left.lines)
    if ending.discard:
        console.warn(f"not pulled, and discarded with the nodes:{listed}")
        return
    advice = (
        f"Next time name such files in [job] outputs of cloudddp.toml (now {toml(outputs)}), or in"
        if outputs
        else "Next time name what nobody needs in"
    )
    raise Leftovers(
        f"cluster {cluster.name} is kept {_end_nodes_later(settings.cluster, cluster, ending)}: not all "
        f"files that the job wrote were pulled{listed}",
        hint=f"{left.pull}, then `cloudddp down`. {advice} [job] scratch; --discard terminates the nodes "
        "anyway",
    )


def _end_nodes_later(spec: ClusterSpec, cluster: Cluster, ending: _Ending) -> str:
    """Let the nodes end by themselves after --keep minutes; return how long they stay and what that costs."""
    seconds = ending.keep_files * timing.current().minute
    ends = deadline(cluster)
    limit = (ends - datetime.now(UTC)).total_seconds() if ends else math.inf
    planned: set[int] = set()
    if ending.job and seconds < limit and process_nodes.in_use() is None:
        with contextlib.suppress(CloudDDPError, OSError):
            runner, _ = connect.connect_reachable(cluster, spec)
            with contextlib.closing(runner):
                planned = poweroff.plan(runner, ending.job, seconds)
    if not planned:
        return f"until its deadline, {_deadline(cluster)}, at {_price(cluster)}"
    cost = "" if cluster.hour is None else f", at most {dollars(cluster.hour * ending.keep_files / 60)}"
    gone = moment(datetime.now(UTC) + timedelta(seconds=seconds))
    rest = sorted(cluster.nodes.keys() - planned)
    others = f" ({node_list(rest)}: until the deadline, {_deadline(cluster)})" if rest else ""
    return f"for {duration(60 * ending.keep_files)}, until {gone}{others}, at {_price(cluster)}{cost}"


def _deadline(cluster: Cluster) -> str:
    ends = deadline(cluster)
    return moment(ends) if ends else "their deadline"


def _price(cluster: Cluster) -> str:
    return "an unknown price" if cluster.hour is None else f"{dollars(cluster.hour)} an hour"
