"""`launch`: sync the project, start the ranks, follow them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cli import session as sessions
from cloudddp.cli.actions import deadlines, rehearsal
from cloudddp.cli.actions.follow import Detached, JobStopped, foreground, report_end
from cloudddp.cli.actions.results import collect, report_new
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster.model import Cluster
from cloudddp.config import env_file
from cloudddp.config.options import Flag, GlobalOptions
from cloudddp.errors import Command, Interrupted, Text, UsageError
from cloudddp.job import cancel
from cloudddp.job import launch as starting
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.ranks import Script

KEEP = 30.0  # minutes that the nodes of `launch --down` stay for a pull


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
            "--down needs -d", hint=(Command("run"), " removes its cluster, too, and pulls results first")
        )
    if keep is not None and not ends:
        raise UsageError(
            "--keep needs --down", hint="it is the time in which results can be pulled after the job"
        )
    poweroff = (KEEP if keep is None else keep) if ends else None
    flags = [*flags, *env_file.flags(variables, env_files, os.environ)]
    session = sessions.start(console, options, flags=flags, anyone=anyone, dry_run=dry_run)
    wanted = checked_script(session, Script(script, tuple(args), module))
    if dry_run:
        rehearsal.launch(console, session.settings, wanted, session.root)
        return 0
    job_id = starting.new_id()
    try:
        finished = _launch(session, wanted, job_id, detach=detach, poweroff=poweroff)
    except JobStopped as stopped:
        hint: Text = (Command("down"), " stops the bill")
        if stopped.cancel_again:
            hint = (Command("cancel", job_id), ", and again if necessary")
        raise Interrupted(f"{stopped.outcome}; the cluster is still up", hint=hint) from None
    except Detached:
        console.log(
            f"job {job_id} keeps running: ", Command("logs", "-f", job_id), " follows it, ",
            Command("cancel", job_id), " ends it",
        )  # fmt: skip
        return 0
    if finished is None:
        return 0
    if finished.lost:
        console.log(
            "next: ", Command("status"), "; with the remaining nodes: ", Command("pull"), ", ", Command("down")
        )  # fmt: skip
    elif finished.leaving:
        console.log("next: ", Command("down"), ", then ", Command("up"), " and ", Command("launch"), " again")
    elif finished.exit_code:
        console.log("the cluster is still up; ", Command("down"), " stops the bill")
    return finished.exit_code


def _launch(
    session: Session, script: Script, job_id: str, *, detach: bool, poweroff: float | None
) -> JobResult | None:
    """Start the job, and follow it to its end unless `detach` is set."""
    console = session.console
    with session.connect(whole=True) as (cluster, runner):
        with stopped_if_interrupted(console, runner, job_id):
            start_job(session, runner, cluster, script, job_id, poweroff=poweroff)
            if detach:
                console.print(job_id)
                console.log(
                    "next: ", Command("logs", "-f", job_id), "   (", Command("cancel", job_id), " ends it)"
                )  # fmt: skip
                deadlines.report_leaving(console, cluster, session.settings, poweroff=poweroff)
                return None
            finished, seconds = foreground(session, runner, cluster, job_id)
        report_end(session, cluster, finished, seconds)
        if finished.leaving:
            _pull_before_the_end(session, runner, finished)
        elif not finished.lost:
            report_new(console, runner, session.settings, job_id)
    return finished


def _pull_before_the_end(session: Session, runner: Runner, finished: JobResult) -> None:
    """Pull the results of a job whose nodes are about to end."""
    lost = dict(zip(finished.lost, finished.lost_reasons, strict=True))
    left = collect(session, runner, finished.job, lost)
    for line in left.lines:
        session.console.warn(f"not pulled: {line}")
    if left.lines:
        session.console.log("before the nodes end: ", left.pull)


def checked_script(session: Session, script: Script, *, fresh: bool = False) -> Script:
    """Return the script by its path in the project. Raises UsageError before anything is called."""
    return starting.prepare(session.root, Path.cwd(), script, session.settings, fresh=fresh)


def start_job(
    session: Session,
    runner: Runner,
    cluster: Cluster,
    script: Script,
    job_id: str,
    *,
    poweroff: float | None = None,
) -> None:
    """Start the job. Call it inside `stopped_if_interrupted`."""
    deadlines.warn_if_near(session.console, cluster)
    with session.console.progress() as progress:
        starting.launch(
            runner, cluster, session.settings, script, root=session.root, progress=progress, job_id=job_id,
            poweroff=poweroff,
        )  # fmt: skip


@contextlib.contextmanager
def stopped_if_interrupted(console: Console, runner: Runner, job_id: str) -> Iterator[None]:
    """End the job at a Ctrl-C while it is being started, or before it is followed. Raises JobStopped."""
    try:
        yield
    except signals.HungUp:
        raise
    except KeyboardInterrupt:
        with signals.protected(lambda: console.log("still ending the job; this takes a moment")):
            unsure = cancel.abort_launch(runner, job_id)
        known = f"it may still run on node {', '.join(map(str, unsure))}" if unsure else "it was ended"
        outcome = f"interrupted while job {job_id} was being started; {known}"
        raise JobStopped(job_id, outcome, cancel_again=bool(unsure)) from None
