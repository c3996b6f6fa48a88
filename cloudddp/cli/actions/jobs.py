"""`logs`, `jobs` and `cancel`."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.cli import session as sessions
from cloudddp.cli.actions.follow import (
    ended_nodes_query,
    line_printer,
    quiet_reporter,
    report_end,
    report_stopped,
)
from cloudddp.cli.console import Console
from cloudddp.cli.formats import node_list
from cloudddp.cli.views import jobs as views
from cloudddp.cluster.model import Cluster
from cloudddp.config.options import GlobalOptions
from cloudddp.errors import CloudDDPError, Command, NodeError, UsageError
from cloudddp.job import cancel as cancelling
from cloudddp.job import status
from cloudddp.job.follow.decide import Policy
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.status import JobRecord


def logs(
    console: Console,
    options: GlobalOptions,
    *,
    anyone: bool,
    job_id: str | None,
    follow: bool,
    only: Sequence[int],
) -> int:
    session = sessions.start(console, options, anyone=anyone)
    with session.connect(partly=True) as (cluster, runner):
        record = status.find(status.list_jobs(runner), job_id)
        _refuse_setup(record)
        _check_ranks(only, record, cluster)
        follower = JobFollower(
            runner,
            record.id,
            record.nodes,
            Policy(wait=follow),
            on_line=line_printer(console, frozenset(only) if only else None, launcher=options.verbose),
            on_quiet=quiet_reporter(console),
            ended_instances=ended_nodes_query(session, cluster),
        )
        try:
            finished = follower.run()
        except KeyboardInterrupt:
            console.log("the job keeps running; ", Command("cancel", record.id), " ends it")
            raise
        finally:
            follower.close()
        if not follow:
            _refuse_incomplete(finished)
            return 0
        report_end(session, cluster, finished, record.seconds or 0.0)
        return finished.exit_code


def _refuse_incomplete(finished: JobResult) -> None:
    """Raise NodeError if the logs of some node were not read to their end."""
    if not finished.lost:
        return
    reasons = [
        reason.removeprefix(f"node {node}: ")
        for node, reason in zip(finished.lost, finished.lost_reasons, strict=True)
    ]
    if len(reasons) > 1:
        reasons = [f"node {node}: {reason}" for node, reason in zip(finished.lost, reasons, strict=True)]
    raise NodeError(
        f"cannot read all logs of {node_list(finished.lost)}: {'; '.join(reasons)}",
        hint=("repeat the command; ", Command("status"), " shows the nodes"),
    )


def _refuse_setup(record: JobRecord) -> None:
    if record.status == "setup":
        raise CloudDDPError(
            f"job {record.id} is still in its setup and has no logs yet",
            hint=(
                "repeat this when ", Command("jobs"), " shows it running; ", Command("cancel", record.id), " ends it"
            ),
        )  # fmt: skip


def _check_ranks(only: Sequence[int], record: JobRecord, cluster: Cluster) -> None:
    """Raise UsageError for a rank that the job does not have, if every node has reported how many it runs."""
    known = not cluster.missing and set(record.nodes) == set(cluster.nodes)
    for rank in only if known else ():
        if not 0 <= rank < record.ranks:
            raise UsageError(
                f"job {record.id} has no rank {rank}",
                hint="its only rank is 0" if record.ranks == 1 else f"its ranks are 0 to {record.ranks - 1}",
            )


def jobs(console: Console, options: GlobalOptions, *, anyone: bool, as_json: bool) -> None:
    session = sessions.start(console, options, anyone=anyone)
    with session.connect(partly=True) as (_, runner):
        known = status.list_jobs(runner)
        if as_json:
            console.print_json(views.jobs_json(known))
        elif known:
            console.print(views.jobs_table(known))
        else:
            console.log("no jobs")


def cancel(console: Console, options: GlobalOptions, *, anyone: bool, job_id: str | None) -> None:
    session = sessions.start(console, options, anyone=anyone)
    with session.connect(partly=True) as (_, runner):
        record = status.find(status.list_jobs(runner), job_id)
        done = cancelling.cancel(runner, record.id, grace=session.settings.job.stop_grace)
        if done.text:
            console.print(f"job {record.id}: {done.text}")
            report_stopped(console, done.training)
        else:
            how = (
                f" ({record.status})" if record.status.ended else ""
            )  # it may have ended since it was listed
            console.print(f"job {record.id}: it had already ended{how}")
