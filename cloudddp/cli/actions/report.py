"""`report`: one HTML page about a job."""

from __future__ import annotations

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.cli.console import Console
from cloudddp.config import project
from cloudddp.config.command_line import GlobalOptions
from cloudddp.config.spec import RESULTS
from cloudddp.errors import CloudDDPError, Command
from cloudddp.formats import from_here
from cloudddp.operations.report import write
from cloudddp.text import one_line


def report(console: Console, options: GlobalOptions, *, job_id: str | None) -> None:
    base = project.find(options.config).root / RESULTS
    pulled = sorted(path.name for path in base.glob("*") if has_job_id_format(path.name))
    found = [one for one in pulled if one.startswith(job_id or "")]
    if not found:
        what = f"job {one_line(repr(job_id), 80)}" if job_id else "job"
        hint = (Command("pull"), " brings the results and logs of a job")
        raise CloudDDPError(f"no {what} is in {from_here(base)}", hint=hint)
    console.print(from_here(write(found[-1], base / found[-1])))
