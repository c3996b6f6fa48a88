"""`report`: one HTML page about a job."""

from __future__ import annotations

from cloudddp.agent.protocol.codec import has_job_id_format
from cloudddp.cli.console import Console
from cloudddp.config import project
from cloudddp.config.spec import RESULTS
from cloudddp.errors import CloudDDPError, Message
from cloudddp.formats import from_here
from cloudddp.job.launch_record import choose
from cloudddp.job.report import page


def report(console: Console, *, job_id: str | None) -> None:
    base = project.find(console.options.config).root / RESULTS
    pulled = sorted(path.name for path in base.glob("*") if has_job_id_format(path.name) and path.is_dir())
    if not pulled:
        hint = Message("`cloudddp pull` brings the results and logs of a job")
        raise CloudDDPError(f"no job is in {from_here(base)}", hint=hint)
    found = choose(pulled, job_id, f"was not pulled to {from_here(base)}")
    console.print(from_here(page.write(page.Evidence.of(found, base / found))))
