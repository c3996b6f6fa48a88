"""`jobs` and `cancel`."""

from __future__ import annotations

from cloudddp.cli.actions.follow import report_stopped
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cli.views import jobs as views
from cloudddp.cluster import nodes_end
from cloudddp.errors import NodeError
from cloudddp.job import cancel as cancelling
from cloudddp.job import status
from cloudddp.job.results import new_files
from cloudddp.operations.node_connections import reachable
from cloudddp.operations.results_on_nodes import report_held


def jobs(console: Console, *, as_json: bool) -> None:
    session = start_session(console)
    with reachable(session, listing=True) as (cluster, runner):
        silent: dict[int, NodeError] = {}
        known = status.list_jobs(runner, silent=silent)
        if as_json:
            console.print_json(views.jobs_json(known))
        elif known:
            console.print(views.jobs_table(known))
            ending = views.ending(known, nodes_end.of(cluster))
            for line in filter(None, (*views.troubles(known), ending, *views.copies(known))):
                console.log(line)
            report_held(console, new_files.find_all(runner, session.settings.job).values, session.settings)
        else:
            console.suggest(f"no jobs; {nodes_end.of(cluster).sentence}")
        if silent:
            raise silent[min(silent)]


def cancel(console: Console, *, job_id: str | None) -> None:
    session = start_session(console)
    with reachable(session) as (_, runner):
        record = status.find_job(runner, job_id)
        done = cancelling.cancel(runner, record.id, grace=session.settings.job.stop_grace)
        how = f" ({record.status})" if record.status.ended else ""  # or it has ended since it was listed
        console.print(f"job {record.id}: {done.text or f'it had already ended{how}'}")
        if done.text:
            report_stopped(console, done.training)
