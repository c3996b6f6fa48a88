"""`run`: up, launch, pull and down in one command. The cluster is removed after failures, too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cli.actions.follow import JobDisplay, report_end, report_started
from cloudddp.cli.actions.up import bring_up
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import connect, nodes_end, region_search, teardown
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import deadline
from cloudddp.cluster.plan import Plan
from cloudddp.config.cluster_spec import ClusterSpec
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
from cloudddp.formats import credentials_end, dollars, duration, format_time, plural, toml
from cloudddp.job import cancel, poweroff, project_files
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.next_attempt import Reason
from cloudddp.job.results import pull
from cloudddp.local_state import ClusterFolder
from cloudddp.operations import process_nodes
from cloudddp.operations.continuation import continue_job
from cloudddp.operations.node_connections import connected, reachable
from cloudddp.operations.results import Unpulled, collect
from cloudddp.operations.start_job import (
    Detached,
    JobStopped,
    checked_script,
    report_results_here,
    results_of,
    send_files,
    start_and_follow,
)
from cloudddp.operations.take_down import take_down_id
from cloudddp.text import node_list, one_line

_TO_REPEAT = timedelta(minutes=5)
_UNCHECKED = Unpulled(
    ("the nodes were not checked, so their files are unknown",), Message("`cloudddp pull --all-nodes`")
)


@dataclass(slots=True)
class _Cleanup:
    """What has to be removed, how the job ended, and which files keep the nodes from being terminated."""

    discard: bool
    keep: float | None = None  # minutes for which the nodes stay after a job that has failed
    keep_files: float = 60.0  # minutes for which nodes stay that hold files
    results: Sequence[Path] = ()  # of earlier jobs, to put on the nodes
    job: str = ""  # that was started last, and may have written files
    cluster: Cluster | None = None  # None until `run` has to remove it
    finished: JobResult | None = None
    detached: str = ""  # the job that the user has left running
    left: Unpulled = field(default_factory=Unpulled)  # on the nodes

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
    *,
    detach: bool,
    discard: bool,
    keep: float | None,
    keep_files: float,
    put_back: bool,
    job_id: str | None = None,
    module: bool,
    script: str,
    args: Sequence[str],
) -> int:
    session = start_session(console, variables=console.options.variables)
    checked = checked_script(session, Script(script, tuple(args), module), fresh=True)
    process_nodes.check_role(session.settings)
    hint = "make it a folder that you can write to, or remove it"
    pull.check_target(session.root / project_files.RESULTS, hint=hint)
    results = results_of(session, put_back and (job_id or True))
    if detach:
        if discard or keep is not None:
            what = "-d excludes --discard and --keep-on-failure: the nodes end by themselves"
            raise UsageError(what, hint="leave them out")
        process_nodes.refuse(
            "run -d needs nodes that power off by themselves; the simulator's process nodes do not",
            Message("leave out -d: `cloudddp run` then removes the nodes itself"),
        )
    name = session.settings.cluster.name
    if region_search.in_regions(
        session.account.searched_regions(session.account.clouds()), name, ignore_progress
    ).of(name):
        raise _exists(name)
    if not put_back:
        report_results_here(session, "add --results to this command")
    cleanup = _Cleanup(discard, keep, keep_files, results)
    try:
        with signals.interruptible():  # but not the teardown
            bring_up(session, check=partial(_check, console.options.yes or detach), on_ready=cleanup.take)
            if cleanup.cluster is None:
                raise _exists(name)  # another command has created it in the meantime
            session.account.region = cleanup.cluster.region
            if detach:
                _leave_to_the_nodes(session, checked, cleanup)
                return 0
            finished = _run_job(session, checked, cleanup)
    except JobStopped as stopped:
        raise Interrupted(f"{stopped.outcome}; the cluster is removed") from None
    except Interrupted as stopped:  # its hint would be about a cluster that stays up
        raise Interrupted(stopped.message) from None
    finally:
        if cleanup.cluster is not None:
            session.account.region = cleanup.cluster.region  # Ctrl-C may have come before it was set above
            _end(session, cleanup.cluster, cleanup)
    return finished.exit_code or int(bool(cleanup.left.incomplete))


def _leave_to_the_nodes(session: Session, script: Script, cleanup: _Cleanup) -> None:
    """Start the job, after which the nodes end by themselves; from then on nothing is left to do here."""
    copied = session.settings.job.results_s3 is not None  # the nodes wait for that
    job = NewJob(script, 0.0 if copied else cleanup.keep_files, keep=cleanup.keep_files)
    with connected(session) as (cluster, runner):
        if cleanup.results:
            send_files(session, runner, cluster, cleanup.results)
        start_and_follow(session, runner, cluster, job, None, nodes_stay=False)
        cleanup.cluster = None
        report_started(session.console, cluster, session.settings, job)


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
        f"your AWS {credentials_end(ends)}, before the cluster's deadline ({format_time(deadline)}): `run` "
        "may be unable to remove the cluster, which then costs money until that deadline. Nothing was "
        "created",
        hint=f"{aws.credentials.renewal_now()}; or {shorter}or --yes to run anyway",
    )


@dataclass(frozen=True)
class _Collecting(JobDisplay):
    """Shows the job, and the one that continues it, and pulls the results of each when it has ended."""

    cleanup: _Cleanup = field(kw_only=True)

    def report(self, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
        cleanup = self.cleanup
        cleanup.finished, cleanup.job, cleanup.left = finished, finished.job, _UNCHECKED
        cleanup.cluster = cluster  # nodes may have been replaced
        try:
            report_end(self.session, runner, cluster, finished)
        finally:
            _collect(self.session, runner, cluster, finished.job, cleanup)


def _run_job(session: Session, script: Script, cleanup: _Cleanup) -> JobResult:
    """Run the job to its end, also on other nodes where it has lost one; pull its results."""
    job = NewJob(script, cleanup.keep)  # the nodes end by themselves also if this computer is lost
    display = _Collecting(session, cleanup=cleanup)
    try:
        with connected(session) as (cluster, runner):
            if cleanup.results:
                send_files(session, runner, cluster, cleanup.results)
            cleanup.job, cleanup.left = job.id, _UNCHECKED
            finished = start_and_follow(session, runner, cluster, job, display, nodes_stay=False)
        done = continue_job(session, cluster, job.id, finished, display)
        cleanup.cluster = done.cluster
    except Detached as left:
        cleanup.detached = left.job_id
        raise
    except (Exception, KeyboardInterrupt):
        _collect_rest(session, cleanup)
        raise
    if done.gave_up and done.gave_up.reason is Reason.NO_CAPACITY and not cleanup.stays:
        again = f"`cloudddp run --wait-capacity 2h {q(*script.argv)}`"
        hint = f"run it again later, or let it wait for capacity: {again}"
        raise CloudDDPError(done.gave_up.text, hint=hint)
    return done.ended


def _collect_rest(session: Session, cleanup: _Cleanup) -> None:
    """After an error or an interrupt, pull the results of the job that was started last, and may still run.
    The cluster is kept if a node does not answer, since its files are unknown."""
    if not cleanup.job or cleanup.cluster is None:
        return
    newest = max([*ClusterFolder(cleanup.cluster.id).jobs(), cleanup.job])
    if newest == cleanup.job and cleanup.finished is not None:
        return  # its results were pulled
    cleanup.finished, cleanup.job, cleanup.left = None, newest, _UNCHECKED
    with (
        contextlib.suppress(CloudDDPError),
        reachable(session, required=()) as (cleanup.cluster, runner),
    ):
        _collect(session, runner, cleanup.cluster, newest, cleanup)


def _collect(session: Session, runner: Runner, cluster: Cluster, job_id: str, cleanup: _Cleanup) -> None:
    """Pull results before the nodes are terminated. A job that may still run is ended first."""
    if cleanup.unknown or cleanup.detached:
        return
    if cleanup.finished is None:
        with signals.protected(lambda: session.console.log("checking the nodes for results first")):
            cancel.abort_launch(runner, job_id, grace=session.settings.job.stop_grace)
    cleanup.left = collect(session, runner, cluster, job_id, cleanup.finished)


def _end(session: Session, cluster: Cluster, cleanup: _Cleanup) -> None:
    """Terminate the nodes, or raise Leftovers, which overrides the job's exit code."""
    console = session.console
    with signals.protected(lambda: console.log(teardown.STILL_REMOVING)):
        try:
            _raise_if_kept(session, cluster, cleanup)
            if cleanup.stays:
                _leave_failed(console, cluster, cleanup)
                return
            report = take_down_id(session, session.account.aws(finishing=True), cluster.id)
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


def _raise_if_kept(session: Session, cluster: Cluster, cleanup: _Cleanup) -> None:
    """Raise Leftovers if the nodes are kept although nobody has asked for it: why, how long, and what they
    cost. With `discard` only warn of what they hold."""
    left, price = cleanup.left, _price(cluster)
    if cleanup.detached:  # that job needs the nodes
        raise Leftovers(
            Message(f"job {cleanup.detached} keeps running, at {price}; {nodes_end.of(cluster).sentence}"),
            hint=f"`cloudddp logs -f {q(cleanup.detached)}`, `cloudddp pull`, `cloudddp down`",
        )
    if cleanup.unknown:  # if this computer cannot reach the nodes, the job may still be running
        if not _still_live(session.account.aws(finishing=True), cluster):
            return
        raise Leftovers(
            Message(
                f"lost connection to all nodes, so {plural(len(cluster.nodes), 'node')} were left running: "
                f"{nodes_end.of(cluster).sentence}"
            ),
            hint="when the network is back: `cloudddp allow-me`, then `cloudddp logs -f`, `cloudddp pull`, "
            "`cloudddp down`",
        )
    if cleanup.stays or not left.lines:
        return
    listed = "".join(f"\n  {one_line(line, 1000)}" for line in left.lines)
    if cleanup.discard:
        session.console.warn(f"not pulled, and discarded with the nodes:{listed}")
        return
    advice = "Next time name what nobody needs in"
    if outputs := session.settings.job.outputs:
        advice = f"Next time name such files in [job] outputs of cloudddp.toml (now {toml(outputs)}), or in"
    stay = _end_nodes_later(session.settings.cluster, cluster, cleanup)
    raise Leftovers(
        f"cluster {cluster.name} is kept {stay}: not all files that the job wrote were pulled{listed}",
        hint=f"{left.pull}, then `cloudddp down`. {advice} [job] scratch; --discard terminates the nodes "
        "anyway",
    )


def _leave_failed(console: Console, cluster: Cluster, cleanup: _Cleanup) -> None:
    """Report what happens to the nodes of a job that has failed, with --keep-on-failure."""
    minutes = 60 * (cleanup.keep or 0.0)
    console.suggest(
        f"the job has failed: its nodes end by themselves once unused for {duration(minutes)}, at "
        f"{_price(cluster)} (--keep-on-failure): `cloudddp ssh`, `cloudddp logs`, `cloudddp pull`; "
        "`cloudddp down` ends them now, and removes what is left"
    )
    for line in cleanup.left.lines:
        console.warn(f"not pulled: {one_line(line, 1000)}")


def _end_nodes_later(spec: ClusterSpec, cluster: Cluster, cleanup: _Cleanup) -> str:
    """Let the nodes end by themselves after --keep minutes; return how long they stay and what that costs."""
    planned: set[int] = set()
    if cleanup.job and process_nodes.in_use() is None:
        with contextlib.suppress(CloudDDPError, OSError):
            runner, _ = connect.connect_reachable(cluster, spec)
            with contextlib.closing(runner):
                replies = poweroff.plan(runner, cluster, cleanup.job, cleanup.keep_files).values
                planned = {node for node, reply in replies.items() if reply.job == cleanup.job}
    if not planned:
        return f"until its deadline, {_deadline(cluster)}, at {_price(cluster)}"
    rest = sorted(cluster.nodes.keys() - planned)
    others = f" ({node_list(rest)}: until the deadline, {_deadline(cluster)})" if rest else ""
    unused = f"until unused for {duration(60 * cleanup.keep_files)}"
    return f"{unused}, or its deadline, {_deadline(cluster)}{others}, at {_price(cluster)}"


def _deadline(cluster: Cluster) -> str:
    ends = deadline(cluster)
    return format_time(ends) if ends else "their deadline"


def _price(cluster: Cluster) -> str:
    return "an unknown price" if cluster.hour is None else f"{dollars(cluster.hour)} an hour"
