"""Starting a job and following it to its end, for `launch`, `run` and `resume`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cli.actions.follow import Detached, JobStopped, foreground, report_end
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster.model import Cluster
from cloudddp.errors import q
from cloudddp.job import cancel
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob
from cloudddp.operations import deadlines
from cloudddp.operations.results import collect, ended_nodes, report_new
from cloudddp.operations.start_job import start_job


def start_and_follow(
    session: Session,
    runner: Runner,
    cluster: Cluster,
    job: NewJob,
    *,
    detach: bool,
    suggest: bool = True,
    nodes_stay: bool = True,
    on_start: Callable[[], None] = lambda: None,
) -> JobResult | None:
    """Start the job, and follow it to its end unless `detach` is set. Raises JobStopped and Detached.

    `suggest`: report what to type next; not where the caller goes on by itself. `nodes_stay`: as for
    `start_job`. `on_start` is called when the job has been started.
    """
    console = session.console
    with stopped_if_interrupted(console, runner, job.id):
        sending = start_job(session, runner, cluster, job, nodes_stay=nodes_stay)
        on_start()
        if detach:
            sending.wait()
            if not suggest:
                return None
            console.print(job.id)
            console.suggest(f"next: `cloudddp logs -f {q(job.id)}`   (`cloudddp cancel {q(job.id)}` ends it)")
            deadlines.report_leaving(console, cluster, session.settings, job)
            return None
        try:
            finished = foreground(session, runner, cluster, job.id)
        except Detached:
            deadlines.report_leaving(console, cluster, session.settings, job)
            raise
        finally:
            sending.abandon()
    report_end(session, runner, cluster, finished)
    deadlines.report_copies(console, session.settings, job.id)
    if finished.leaving is not None:
        pull_before_the_end(session, runner, cluster, finished)
    elif suggest:
        report_new(console, runner, session.settings, finished)
    return finished


def pull_before_the_end(session: Session, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
    """Pull the results of a job whose nodes are about to end."""
    with signals.protected(lambda: session.console.log("checking the nodes for results first")):
        ended = ended_nodes(session, cluster, finished)
    left = collect(session, runner, cluster, finished.job, ended)
    for line in left.lines:
        session.console.warn(f"not pulled: {line}")
    if left.lines:
        session.console.suggest(f"before the nodes end: {left.pull}")


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
