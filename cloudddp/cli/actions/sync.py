"""`sync`, and how every verb that sends files knows whose files are on the nodes."""

from __future__ import annotations

from pathlib import Path

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Command, UsageError
from cloudddp.formats import counted
from cloudddp.job import project_files, unsent
from cloudddp.job import sync as syncing
from cloudddp.job.results.restore import check_complete, restore, results_here
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.node_connections import connected
from cloudddp.operations.start_job import origin_of
from cloudddp.text import one_line


def sync(
    console: Console, options: GlobalOptions, *, anyone: bool, yes: bool, results: bool, job_id: str | None
) -> None:
    if job_id is not None and not results:
        raise UsageError(
            "a job is for --results", hint=("send its results: ", Command("sync", "--results", job_id))
        )
    session = sessions.start(console, options, anyone=anyone)
    folder = _results_of(session, job_id) if results else None
    for why in check_complete(folder) if folder is not None else ():
        console.warn(f"not sent: {one_line(why, 1000)}")
    files = project_files.of_config(session.root, session.settings)
    for note in unsent.notes(files, session.settings):
        console.warn(note)
    with connected(session) as (cluster, runner), console.progress() as progress:
        try:
            syncing.sync(
                runner,
                cluster,
                session.settings,
                files=files,
                progress=progress,
                origin=origin_of(session, yes=yes),
            )
            if folder is not None:
                count = restore(
                    runner, cluster, session.settings.job, folder, project=files.manifest, progress=progress
                )
                state = ClusterFolder(cluster.id)
                state.write(state.restored, "")
                progress(
                    f"{counted(count, 'result')} of {folder} on the nodes, where a sync leaves them alone"
                )
        except KeyboardInterrupt:
            console.log("files that have arrived are kept; repeat the command to send the others")
            raise


def _results_of(session: Session, job_id: str | None) -> Path:
    """Return the folder of a job's results, by default the newest. Raises UsageError."""
    base = session.root / project_files.RESULTS
    found = results_here(session.root)
    chosen = [path for path in found if job_id in (None, path.name)]
    if not chosen:
        raise UsageError(
            f"{base} has no results" + (f" of job {job_id}" if job_id else ""),
            hint=(
                f"available: {', '.join(path.name for path in found[-5:])}"
                if found
                else (Command("pull"), " copies them")
            ),
        )
    return chosen[-1]
