"""`sync`."""

from __future__ import annotations

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.config.options import GlobalOptions
from cloudddp.job import project_files
from cloudddp.job import sync as syncing


def sync(console: Console, options: GlobalOptions, *, anyone: bool, yes: bool) -> None:
    session = sessions.start(console, options, anyone=anyone)
    files = project_files.of_config(session.root, session.settings)
    for note in project_files.notes(files, session.settings):
        console.warn(note)
    with session.connect() as (cluster, runner), console.progress() as progress:
        try:
            syncing.sync(
                runner, cluster, session.settings, files=files, progress=progress,
                origin=session.origin(yes=yes, before=progress.stop),
            )  # fmt: skip
        except KeyboardInterrupt:
            console.log("files that have arrived are kept; repeat the command to send the others")
            raise
