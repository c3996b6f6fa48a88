"""`report`: one HTML page about a job."""

from __future__ import annotations

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.cli.console import Console
from cloudddp.config import project
from cloudddp.config.command_line import GlobalOptions
from cloudddp.config.spec import RESULTS
from cloudddp.errors import CloudDDPError, Message
from cloudddp.formats import from_here
from cloudddp.job.launch_record import choose
from cloudddp.operations.report import write


def report(console: Console, options: GlobalOptions, *, job_id: str | None) -> None:
    base = project.find(options.config).root / RESULTS
    pulled = sorted(path.name for path in base.glob("*") if has_job_id_format(path.name) and path.is_dir())
    if not pulled:
        hint = Message("`cloudddp pull` brings the results and logs of a job")
        raise CloudDDPError(f"no job is in {from_here(base)}", hint=hint)
    found = choose(pulled, job_id, f"was not pulled to {from_here(base)}")
    console.print(from_here(write(found, base / found)))
