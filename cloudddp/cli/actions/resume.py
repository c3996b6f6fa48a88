"""`resume` and `watch`: how a job continues that has ended, or has lost a node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cloudddp.cli.actions.follow import JobDisplay, report_detached, report_started
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.operations.continuation import of_job
from cloudddp.operations.start_job import Detached


def resume(
    console: Console, *, job_id: str | None, detach: bool, replaced: Sequence[int], more: Sequence[str] = ()
) -> int:
    session = start_session(console)
    again = of_job(
        session,
        session.options.flags,
        job_id,
        JobDisplay,
        1,
        waits=False,
        replaced=replaced,
        detach=detach,
        more=more,
    )
    try:
        again.run().checked()
    except Detached as left:
        return report_detached(console, left)
    if again.result is not None:
        return again.result.exit_code
    if again.job is not None:
        report_started(console, again.cluster, again.session.settings, again.job)
    return 0


def watch(console: Console, *, job_id: str | None, times: int) -> int:
    session = start_session(console)
    again = of_job(session, console.options.flags, job_id, partial(JobDisplay, suggest=False), times)
    return again.run().ended.exit_code
