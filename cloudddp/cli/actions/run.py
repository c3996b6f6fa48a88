"""`run`: up, launch, pull and down in one command. The cluster is removed after failures, too."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cli.actions.follow import JobDisplay, report_detached, report_end
from cloudddp.cli.actions.up import bring_up
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import connect, nodes_end, region_search, teardown
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import deadline
from cloudddp.cluster.plan import Plan
from cloudddp.config.command_line import Flag, GlobalOptions, variable_flags
from cloudddp.config.spec import ClusterSpec
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
from cloudddp.job import cancel, poweroff, project_files
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.next_attempt import Reason
from cloudddp.job.results import pull
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import process_nodes
from cloudddp.operations.continuation import go_on
from cloudddp.operations.node_connections import connected
from cloudddp.operations.results import Left, collect
from cloudddp.operations.start_job import (
    Detached,
    JobStopped,
    checked_script,
    report_results_here,
    results_of,
    send_files,
    start_and_follow,
)
from cloudddp.operations.take_down import take_down
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
    job: str = ""  # that was started last, and may have written files
    cluster: Cluster | None = None  # None until `run` has to remove it
    finished: JobResult | None = None
    detached: str = ""  # the job that the user has left running
    left: Left = field(default_factory=Left)  # on the nodes

    def take(self, cluster: Cluster) -> None:
        """Take over a cluster that is ready."""
        self.cluster = cluster

    @property
    def unknown(self) -> bool:
        return self.finished is not None and self.finished.status == "unknown"

    @property
    def stays(self) -> bool:
        """Whether the nodes stay for a while, because the job has failed."""
        failed = self.finished is not None and self.finished.exit_code != 0
        return self.keep is not None and failed and not self.unknown


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
    session = start_session(console, options, flags=flags, variables=variables, env_files=env_files)
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
    return finished.exit_code or int(bool(ending.left.incomplete))


def _leave_to_the_nodes(session: Session, script: Script, ending: _Ending) -> None:
    """Start the job, after which the nodes end by themselves; from then on nothing is left to do here."""
    copied = session.settings.job.results_s3 is not None  # the nodes wait for that
    job = NewJob(script, 0.0 if copied else ending.keep_files, keep=ending.keep_files)
    with connected(session) as (cluster, runner):
        if ending.results:
            send_files(session, runner, cluster, ending.results)
        start_and_follow(session, runner, cluster, job, None, nodes_stay=False)
        ending.cluster = None
        report_detached(session.console, cluster, session.settings, job)


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
    ends, deadline = aws.credentials.ends(), max(plan.expires for plan in plans)
    if yes or ends is None or ends >= deadline:
        return
    # Rounded down, and with time to read this, type the command again and confirm it.
    hours = math.floor((ends - datetime.now(UTC) - _TO_REPEAT).total_seconds() / 36) / 100
    shorter = f"`--max-hours {hours:.2f}` for a shorter job, " if hours >= 0.1 else ""
    raise UsageError(
        f"your AWS {credentials_end(ends)}, before the cluster's deadline ({moment(deadline)}): `run` may "
        "be unable to remove the cluster, which then costs money until that deadline. Nothing was created",
        hint=f"{aws.credentials.renewal_now()}; or {shorter}or --yes to run anyway",
    )


@dataclass(frozen=True)
class _Collecting(JobDisplay):
    """Shows the job, and the one that continues it, and pulls the results of each when it has ended."""

    ending: _Ending = field(kw_only=True)

    def report(self, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
        ending = self.ending
        ending.finished, ending.job, ending.left = finished, finished.job, _UNCHECKED
        ending.cluster = cluster  # nodes may have been replaced
        try:
            report_end(self.session, runner, cluster, finished)
        finally:
            _collect(self.session, runner, cluster, finished.job, ending)


def _run_job(session: Session, script: Script, ending: _Ending) -> JobResult:
    """Run the job to its end, also on other nodes where it has lost one and may be started again; pull its
    results."""
    job = NewJob(script, ending.keep)  # the nodes end by themselves also if this computer is lost
    display = _Collecting(session, ending=ending)
    try:
        with connected(session) as (cluster, runner):
            if ending.results:
                send_files(session, runner, cluster, ending.results)
            ending.job, ending.left = job.id, _UNCHECKED
            finished = start_and_follow(session, runner, cluster, job, display, nodes_stay=False)
        done = go_on(session, cluster, job.id, finished, display)
        ending.cluster = done.cluster
    except Detached as left:
        ending.detached = left.job_id
        raise
    except (Exception, KeyboardInterrupt):
        _collect_rest(session, ending)
        raise
    if done.gave_up and done.gave_up.reason is Reason.NO_CAPACITY and not ending.stays:
        again_later = f"`cloudddp run --wait-capacity 2h {q(*script.argv)}`"
        hint = Message(f"run it again later, or let it wait for capacity: {again_later}")
        raise CloudDDPError(done.gave_up.text, hint=hint)
    return done.ended


def _collect_rest(session: Session, ending: _Ending) -> None:
    """After an error or an interrupt, pull the results of the job that was started last, and may still run.
    The cluster is kept if a node does not answer, since its files are unknown."""
    if not ending.job or ending.cluster is None:
        return
    newest = max([*ClusterFolder(ending.cluster.id).jobs(), ending.job])
    if newest == ending.job and ending.finished is not None:
        return  # its results were pulled
    ending.finished, ending.job, ending.left = None, newest, _UNCHECKED
    with (
        contextlib.suppress(CloudDDPError),
        connected(session, partly=True, needed=()) as (ending.cluster, runner),
    ):
        _collect(session, runner, ending.cluster, newest, ending)


def _collect(session: Session, runner: Runner, cluster: Cluster, job_id: str, ending: _Ending) -> None:
    """Pull results before the nodes are terminated. A job that may still run is ended first."""
    if ending.unknown or ending.detached:
        return
    if ending.finished is None:
        with signals.protected(lambda: session.console.log("checking the nodes for results first")):
            cancel.abort_launch(runner, job_id, grace=session.settings.job.stop_grace)
    ending.left = collect(session, runner, cluster, job_id, ending.finished)


def _end(session: Session, cluster: Cluster, ending: _Ending) -> None:
    """Terminate the nodes, or report which are kept and why. Raises Leftovers, which overrides the job's exit
    code."""
    console = session.console
    with signals.protected(lambda: console.log(teardown.STILL_REMOVING)):
        try:
            if (kept := _why_kept(session, cluster, ending)) is not None:
                raise kept
            if ending.stays:
                _leave_failed(console, cluster, ending)
                return
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


def _why_kept(session: Session, cluster: Cluster, ending: _Ending) -> Leftovers | None:
    """Return why the nodes are kept although nobody has asked for it, how long, and what they cost; None if
    they are not. With `discard` only warn of what they hold."""
    left, price = ending.left, _price(cluster)
    if ending.detached:  # that job needs the nodes
        return Leftovers(
            Message(f"job {ending.detached} keeps running, at {price}; {nodes_end.of(cluster).sentence}"),
            hint=f"`cloudddp logs -f {q(ending.detached)}`, `cloudddp pull`, `cloudddp down`",
        )
    if ending.unknown:  # if this computer cannot reach the nodes, the job may still be running
        if not _still_live(session.aws(finishing=True), cluster):
            return None
        return Leftovers(
            Message(
                f"lost connection to all nodes, so {counted(len(cluster.nodes), 'node')} were left running: "
                f"{nodes_end.of(cluster).sentence}"
            ),
            hint="when the network is back: `cloudddp allow-me`, then `cloudddp logs -f`, `cloudddp pull`, "
            "`cloudddp down`",
        )
    if ending.stays or not left.lines:
        return None
    listed = "".join(f"\n  {one_line(line, 1000)}" for line in left.lines)
    if ending.discard:
        session.console.warn(f"not pulled, and discarded with the nodes:{listed}")
        return None
    advice = "Next time name what nobody needs in"
    if outputs := session.settings.job.outputs:
        advice = f"Next time name such files in [job] outputs of cloudddp.toml (now {toml(outputs)}), or in"
    stay = _end_nodes_later(session.settings.cluster, cluster, ending)
    return Leftovers(
        f"cluster {cluster.name} is kept {stay}: not all files that the job wrote were pulled{listed}",
        hint=f"{left.pull}, then `cloudddp down`. {advice} [job] scratch; --discard terminates the nodes "
        "anyway",
    )


def _leave_failed(console: Console, cluster: Cluster, ending: _Ending) -> None:
    """Report what happens to the nodes of a job that has failed, with --keep-on-failure."""
    minutes = 60 * (ending.keep or 0.0)
    console.suggest(
        f"the job has failed: its nodes end by themselves once unused for {duration(minutes)}, at "
        f"{_price(cluster)} (--keep-on-failure): `cloudddp ssh`, `cloudddp logs`, `cloudddp pull`; "
        "`cloudddp down` ends them now, and removes what is left"
    )
    for line in ending.left.lines:
        console.warn(f"not pulled: {one_line(line, 1000)}")


def _end_nodes_later(spec: ClusterSpec, cluster: Cluster, ending: _Ending) -> str:
    """Let the nodes end by themselves after --keep minutes; return how long they stay and what that costs."""
    planned: set[int] = set()
    if ending.job and process_nodes.in_use() is None:
        with contextlib.suppress(CloudDDPError, OSError):
            runner, _ = connect.connect_reachable(cluster, spec)
            with contextlib.closing(runner):
                replies = poweroff.plan(runner, cluster, ending.job, ending.keep_files).values
                planned = {node for node, reply in replies.items() if reply.job == ending.job}
    if not planned:
        return f"until its deadline, {_deadline(cluster)}, at {_price(cluster)}"
    rest = sorted(cluster.nodes.keys() - planned)
    others = f" ({node_list(rest)}: until the deadline, {_deadline(cluster)})" if rest else ""
    unused = f"until unused for {duration(60 * ending.keep_files)}"
    return f"{unused}, or its deadline, {_deadline(cluster)}{others}, at {_price(cluster)}"


def _deadline(cluster: Cluster) -> str:
    ends = deadline(cluster)
    return moment(ends) if ends else "their deadline"


def _price(cluster: Cluster) -> str:
    return "an unknown price" if cluster.hour is None else f"{dollars(cluster.hour)} an hour"
