"""`report`: one HTML page about a job."""

from __future__ import annotations

import webbrowser

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.cli.console import Console
from cloudddp.config import project
from cloudddp.config.command_line import GlobalOptions
from cloudddp.config.spec import RESULTS
from cloudddp.errors import CloudDDPError, Command
from cloudddp.formats import from_here
from cloudddp.local_state import folders_by_job
from cloudddp.operations.report import write
from cloudddp.text import one_line


def report(console: Console, options: GlobalOptions, *, job_id: str | None, browse: bool) -> None:
    base, wanted = project.find(options.config).root / RESULTS, job_id or ""
    pulled = [path.name for path in base.glob("*") if path.name.startswith(wanted)]
    found = sorted(filter(has_job_id_format, pulled or (folders_by_job(wanted) if wanted else ())))
    found = [wanted] if wanted in found else found if wanted else found[-1:]
    if len(found) != 1:
        what = f"job {one_line(repr(job_id), 80)}" if job_id else "job"
        raise CloudDDPError(
            f"{what} is ambiguous: {', '.join(found)}" if found else f"no {what} is known here",
            hint=(Command("pull"), " brings the results and logs of a job"),
        )
    path = write(found[0], base / found[0])
    console.print(from_here(path))
    if browse and not webbrowser.open(path.absolute().as_uri()):
        console.warn(f"no browser was found: open {path.absolute()} in one")
