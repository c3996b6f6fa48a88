"""`launch`: sync the project, start the ranks, follow them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from cloudddp.cli.actions import rehearsal
from cloudddp.cli.actions.follow import JobDisplay, report_detached, report_left
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.config.command_line import Flag, GlobalOptions, variable_flags
from cloudddp.errors import Message, UsageError, q
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import KEEP_MINUTES, NewJob, Script
from cloudddp.operations import deadlines, process_nodes
from cloudddp.operations.continuation import go_on
from cloudddp.operations.node_connections import connected
from cloudddp.operations.start_job import Detached, checked_script, report_results_here, start_and_follow

WATCHDOG = "Watchdog caught collective operation timeout"  # of PyTorch: some rank did not join a collective


def launch(
    console: Console,
    options: GlobalOptions,
    *,
    flags: Sequence[Flag],
    detach: bool,
    ends: bool,
    keep: float | None,
    anyone: bool,
    dry_run: bool,
    module: bool,
    variables: Sequence[str],
    env_files: Sequence[str],
    script: str,
    args: Sequence[str],
) -> int:
    if ends and not detach:
        raise UsageError(
            "--down needs -d",
            hint="`cloudddp run` removes its cluster, too, and pulls results first",
        )
    flags = [*flags, *variable_flags(variables, env_files, os.environ)]
    session = start_session(
        console,
        options,
        flags=flags,
        anyone=anyone,
        dry_run=dry_run,
        variables=variables,
        env_files=env_files,
    )
    if keep is not None and not ends and session.settings.job.on_stall != "down":
        raise UsageError(
            '--keep needs --down, or job.on_stall = "down"',
            hint="it is the time in which results can be pulled before the nodes end",
        )
    keep = KEEP_MINUTES if keep is None else keep
    wanted = checked_script(session, Script(script, tuple(args), module))
    if dry_run:
        rehearsal.launch(console, session.settings, wanted, session.root)
        return 0
    process_nodes.check(session.settings)
    if ends:
        process_nodes.refuse(
            "--down needs nodes that power off by themselves; the simulator's process nodes do not",
            Message("leave it out, and `cloudddp down` when the job has ended; or `cloudddp run`"),
        )
    job = NewJob(wanted, keep if ends else None, keep=keep)
    try:
        finished = _launch(session, job, detach=detach)
    except Detached as left:
        return report_left(console, left)
    if finished is None:
        return 0
    _report_next(console, finished)
    return finished.exit_code


def _report_next(console: Console, finished: JobResult) -> None:
    """Report what to type after a job that has failed."""
    if finished.lost and finished.exit_code:
        console.suggest(
            "next: `cloudddp status`; with the remaining nodes: `cloudddp pull`, `cloudddp down`, or "
            "`cloudddp resume`, which replaces the lost ones"
        )
    elif finished.leaving is not None:
        console.suggest(
            "next: `cloudddp resume` replaces a node that AWS ends, and starts the job again from its "
            "snapshot; after the cluster's deadline: `cloudddp down`, `cloudddp up --max-hours HOURS` "
            "and `cloudddp launch SCRIPT`"
        )
    elif finished.exit_code:
        console.suggest(
            f"the cluster is still up; `cloudddp pull --job {q(finished.job)}` copies logs, verdict and "
            "stacks, `cloudddp down` stops the bill"
        )
    if any(WATCHDOG in line for line in finished.last_lines):
        console.suggest(
            f"`cloudddp stacks {q(finished.job)}` names the ranks that did not join the collective"
        )


def _launch(session: Session, job: NewJob, *, detach: bool) -> JobResult | None:
    """Start the job, and follow it to its end unless `detach` is set."""
    with ExitStack() as connection:
        try:
            cluster, runner = connection.enter_context(connected(session, whole=True))
        except (Exception, KeyboardInterrupt):
            deadlines.report_not_started(session.console, None, job)
            raise
        report_results_here(session, Message("`cloudddp sync --results` first"), cluster)
        display = JobDisplay(session)
        finished = start_and_follow(session, runner, cluster, job, None if detach else display)
        if finished is None:
            report_detached(session.console, cluster, session.settings, job)
            return None
    return go_on(session, cluster, job.id, finished, display).ended
