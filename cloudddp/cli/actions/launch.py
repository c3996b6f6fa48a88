"""`launch`: sync the project, start the ranks, follow them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from cloudddp.cli.actions import rehearsal
from cloudddp.cli.actions.follow import JobDisplay, report_detached, report_started
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.errors import Message, UsageError, q
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import KEEP_MINUTES, NewJob, Script
from cloudddp.operations import deadlines, process_nodes
from cloudddp.operations.continuation import continue_job
from cloudddp.operations.node_connections import connected
from cloudddp.operations.start_job import Detached, checked_script, report_results_here, start_and_follow

WATCHDOG = "Watchdog caught collective operation timeout"  # of PyTorch: some rank did not join a collective


def launch(
    console: Console,
    *,
    detach: bool,
    down: bool,
    keep: float | None,
    dry_run: bool,
    module: bool,
    script: str,
    args: Sequence[str],
) -> int:
    if down and not detach:
        hint = "`cloudddp run` removes its cluster, too, and pulls results first"
        raise UsageError("--down needs -d", hint=hint)
    session = start_session(console, variables=console.options.variables, dry_run=dry_run)
    if keep is not None and not down and session.settings.job.on_stall != "down":
        hint = "it is the time in which results can be pulled before the nodes end"
        raise UsageError('--keep needs --down, or job.on_stall = "down"', hint=hint)
    keep = KEEP_MINUTES if keep is None else keep
    checked = checked_script(session, Script(script, tuple(args), module))
    if dry_run:
        rehearsal.launch(console, session.settings, checked, session.root)
        return 0
    process_nodes.check_role(session.settings)
    if down:
        process_nodes.refuse(
            "--down needs nodes that power off by themselves; the simulator's process nodes do not",
            Message("leave it out, and `cloudddp down` when the job has ended; or `cloudddp run`"),
        )
    job = NewJob(checked, keep if down else None, keep=keep)
    try:
        finished = _launch(session, job, detach=detach)
    except Detached as left:
        return report_detached(console, left)
    if finished is not None:
        _report_next(console, finished)
    return finished.exit_code if finished is not None else 0


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
            report_started(session.console, cluster, session.settings, job)
            return None
    return continue_job(session, cluster, job.id, finished, display).ended
