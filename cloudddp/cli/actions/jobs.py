"""`jobs` and `cancel`."""

from __future__ import annotations

from cloudddp.cli import session as sessions
from cloudddp.cli.actions.follow import report_stopped
from cloudddp.cli.console import Console
from cloudddp.cli.views import jobs as views
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import NodeError
from cloudddp.job import cancel as cancelling
from cloudddp.job import status
from cloudddp.job.results import new_files
from cloudddp.operations import termination
from cloudddp.operations.node_connections import connected
from cloudddp.operations.results import report_held


def jobs(console: Console, options: GlobalOptions, *, anyone: bool, as_json: bool) -> None:
    session = sessions.start(console, options, anyone=anyone)
    with connected(session, partly=True, listing=True) as (cluster, runner):
        silent: dict[int, NodeError] = {}
        known = status.list_jobs(runner, silent=silent)
        if as_json:
            console.print_json(views.jobs_json(known))
        elif known:
            console.print(views.jobs_table(known))
            for sentence in views.troubles(known):
                console.log(sentence)
            if ending := views.ending(known):
                console.log(ending)
            for line in views.copies(known):
                console.log(line)
            report_held(
                console,
                new_files.find_all(runner, session.settings.job).values,
                session.settings,
            )
        else:
            console.log("no jobs")
        end = termination.planned(cluster)
        if end is not None and end.job not in {one.id for one in known}:
            console.log(f"the nodes end {end.text}")
        if silent:
            raise silent[min(silent)]


def cancel(console: Console, options: GlobalOptions, *, anyone: bool, job_id: str | None) -> None:
    session = sessions.start(console, options, anyone=anyone)
    with connected(session, partly=True) as (_, runner):
        record = status.find_job(runner, job_id)
        done = cancelling.cancel(runner, record.id, grace=session.settings.job.stop_grace)
        if done.text:
            console.print(f"job {record.id}: {done.text}")
            report_stopped(console, done.training)
        else:
            # It may have ended since it was listed.
            how = f" ({record.status})" if record.status.ended else ""
            console.print(f"job {record.id}: it had already ended{how}")
