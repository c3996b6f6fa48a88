"""`sync`: send the project's files, and put results back."""

from __future__ import annotations

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.errors import UsageError, q
from cloudddp.job import project_files, unsent
from cloudddp.operations.node_connections import connected
from cloudddp.operations.start_job import results_of, send_files


def sync(console: Console, *, put_back: bool, job_id: str | None) -> None:
    if job_id is not None and not put_back:
        hint = f"send its results: `cloudddp sync --results {q(job_id)}`"
        raise UsageError("a job is for --results", hint=hint)
    session = start_session(console)
    results = results_of(session, put_back and (job_id or True))
    files = project_files.of_config(session.root, session.settings)
    for note in unsent.notes(files, session.settings):
        console.warn(note)
    with connected(session) as (cluster, runner):
        try:
            send_files(session, runner, cluster, results, files=files)
        except KeyboardInterrupt:
            console.log("files that have arrived are kept; repeat the command to send the others")
            raise
