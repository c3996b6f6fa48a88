"""Starting a job, for `launch`, `run` and `resume`."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import SETUP_RANK
from cloudddp.cli.actions import deadlines
from cloudddp.cli.actions.follow import Detached, JobStopped, foreground, line_printer, report_end
from cloudddp.cli.actions.results import collect, ended_nodes, report_new
from cloudddp.cli.actions.sync import origin_of
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config
from cloudddp.errors import Command, UsageError
from cloudddp.job import cancel, launch, launch_record
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.poweroff import Hold
from cloudddp.job.py_spy import Sending
from cloudddp.local_state import ClusterFolder
from cloudddp.text import without_colours


def checked_script(session: Session, script: Script, *, fresh: bool = False) -> Script:
    """Return the script by its path in the project. Raises UsageError before anything is called."""
    found = launch.prepare(
        session.root,
        Path.cwd(),
        script,
        session.settings,
        fresh=fresh,
        secret_files=map(Path, session.env_files),
        warn=session.console.warn,
    )
    if (here := Path.cwd()) != session.root and here.is_relative_to(session.root):
        session.console.log(
            f"the project is {session.root}: ranks start there, not in {here.relative_to(session.root)}/"
        )
    if fresh:
        check_nodes_min(session.settings, session.settings.cluster.nodes)
    return found


def start_job(
    session: Session,
    runner: Runner,
    cluster: Cluster,
    job: NewJob,
    *,
    nodes_stay: bool = True,
) -> Sending:
    """Start the job, and record what it was launched with; return what is still being sent. Call it inside
    `stopped_if_interrupted`.

    If the job is not started, the nodes still power off where that was planned, and it is reported when; not
    where the caller removes them (`nodes_stay`).
    """
    session = _without_torch(session)
    deadlines.warn_if_near(session.console, cluster)
    check_nodes_min(session.settings, len(cluster.nodes) + cluster.missing)
    record = launch_record.of_launch(
        job,
        session.settings,
        root=session.root,
        files=session.files,
        variables=session.variables,
        env_files=session.env_files,
        nodes=[node.id for node in cluster.nodes.values()],
    )
    folder = ClusterFolder(cluster.id)
    launch_record.keep(folder, record)
    hold = Hold(job)
    try:
        with session.console.progress() as progress:
            return launch.launch(
                runner,
                cluster,
                session.settings,
                job,
                root=session.root,
                progress=progress,
                hold=hold,
                secret_files=map(Path, session.env_files),
                origin=origin_of(session, before=progress.stop),
                on_setup_line=_setup_line_printer(session.console),
            )
    except signals.HungUp:
        raise  # what has started continues
    except (Exception, KeyboardInterrupt):
        launch_record.drop(folder, job.id)  # it was refused, or is ended: there is nothing to resume
        with signals.protected(lambda: session.console.log("still restoring the planned end of the nodes")):
            hold.release(runner)
        if nodes_stay:
            deadlines.report_not_started(session.console, cluster, job, hold.left)
        raise


def _without_torch(session: Session) -> Session:
    """Return the settings for a rehearsal where torch, and so torchrun, is not installed: a script without
    torch needs none. Nodes of the simulator use the packages of this computer."""
    job, setup = session.settings.job, session.settings.setup
    own = job.python or job.rendezvous != "c10d" or setup.environment or setup.run
    if not session.options.sim or own or importlib.util.find_spec("torch") is not None:
        return session
    session.console.log("torch is not installed here: ranks start without torchrun (--rendezvous direct)")
    settings = msgspec.structs.replace(
        session.settings, job=msgspec.structs.replace(job, rendezvous="direct")
    )
    return replace(session, settings=settings)


def _setup_line_printer(console: Console) -> Callable[[int, str], None]:
    """Return a function that shows a line of the setup as `[setup | node 1] text`, on stderr: a detached
    launch writes the job's id to stdout."""
    show = line_printer(console, write=lambda text: console.print(text, err=True), shown=without_colours)
    return lambda node, line: show(node, SETUP_RANK, line)


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
            console.log(
                "next: ", Command("logs", "-f", job.id), "   (", Command("cancel", job.id), " ends it)"
            )
            deadlines.report_leaving(console, cluster, session.settings, job)
            return None
        try:
            finished = foreground(session, runner, cluster, job.id)
        except Detached:
            deadlines.report_leaving(console, cluster, session.settings, job)
            raise
        finally:
            sending.abandon()
    report_end(session, cluster, finished)
    deadlines.report_copies(console, session.settings, job.id)
    if finished.leaving is not None:
        pull_before_the_end(session, runner, cluster, finished)
    elif suggest and not finished.lost:
        report_new(console, runner, session.settings, job.id)
    return finished


def pull_before_the_end(session: Session, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
    """Pull the results of a job whose nodes are about to end."""
    with signals.protected(lambda: session.console.log("checking the nodes for results first")):
        ended = ended_nodes(session, cluster, finished)
    left = collect(session, runner, cluster, finished.job, ended)
    for line in left.lines:
        session.console.warn(f"not pulled: {line}")
    if left.lines:
        session.console.log("before the nodes end: ", left.pull)


def check_nodes_min(config: Config, nodes: int) -> None:
    """Raise UsageError where the job needs more nodes than there are."""
    least = config.job.nodes_min
    if least is not None and least > nodes:
        raise UsageError(
            f"job.nodes_min is {least}, and the cluster has {nodes} node{'s' * (nodes != 1)}",
            hint=f"give at most {nodes}: --nodes-min {nodes}",
        )


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
