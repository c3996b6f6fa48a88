"""`resume` and `watch`: how a job continues that has ended, or has lost a node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cloudddp.cli.actions.follow import JobDisplay, report_detached, report_left
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.operations.continuation import of_job
from cloudddp.operations.start_job import Detached


def resume(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    job_id: str | None,
    detach: bool,
    yes: bool,
    replaced: Sequence[int],
    variables: Sequence[str],
    env_files: Sequence[str],
    more: Sequence[str],
) -> int:
    console.yes = yes
    session = start_session(console, options, flags=flags, variables=variables, env_files=env_files)
    again = of_job(
        session, flags, job_id, JobDisplay, 1, waits=False, replaced=replaced, detach=detach, more=more
    )
    try:
        again.run().checked()
    except Detached as left:
        return report_left(console, left)
    if again.result is not None:
        return again.result.exit_code
    if again.job is not None:
        report_detached(console, again.cluster, again.session.settings, again.job)
    return 0


def watch(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    job_id: str | None,
    times: int,
    variables: Sequence[str],
    env_files: Sequence[str],
) -> int:
    session = start_session(console, options, flags=flags, variables=variables, env_files=env_files)
    again = of_job(session, flags, job_id, partial(JobDisplay, suggest=False), times)
    return again.run().ended.exit_code
