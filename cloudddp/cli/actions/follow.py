"""Following a job: its logs, silent nodes, how it ended; and cancelling it at Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import click

from cloudddp import signals, timings
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import LAUNCHER_RANK, NOTE, RESTART_NOTE, SETUP_RANK
from cloudddp.agent.protocol.last_error import last_error
from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.cli.console import Console, Progress, write_raw
from cloudddp.cli.session import Session
from cloudddp.cli.views.jobs import after_reboot
from cloudddp.cluster import lookup
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config
from cloudddp.errors import EXIT_LEFTOVERS, AWSError, Message, inert, q
from cloudddp.formats import duration, plural
from cloudddp.job import cancel, unsent
from cloudddp.job.failure_text import advice, exited_text
from cloudddp.job.follow.events import Silence
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.job_request import NewJob
from cloudddp.job.project_scan import import_advice, listing_of
from cloudddp.operations import deadlines
from cloudddp.operations.results import ended_reports
from cloudddp.operations.results_on_nodes import only_elsewhere, report_new
from cloudddp.operations.start_job import Detached, Display, JobStopped
from cloudddp.text import node_list, with_colours, without_colours

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")


@dataclass(frozen=True)
class JobDisplay(Display):
    """Shows jobs on the console. `suggest`: report what can be pulled, where the command ends then."""

    session: Session
    suggest: bool = True

    @timings.span("job")
    def follow(
        self,
        runner: Runner,
        cluster: Cluster,
        job_id: str,
        nodes: Collection[int],
        *,
        mine: bool = False,
        timeout: float | None = None,
    ) -> JobResult:
        """For a job of this command (`mine`), Ctrl-C asks on a terminal whether to cancel the job on every
        node, to leave it, or to keep watching; elsewhere it cancels the job."""
        session, console = self.session, self.session.console
        waiting, printed = console.progress(), line_printer(console)
        waiting(f"waiting for the first output of job {job_id}")

        def show(node: int, rank: int, line: str) -> None:
            timings.mark("first line")
            waiting.stop()
            printed(node, rank, line)

        follower = follower_of(session, runner, cluster, job_id, nodes, on_line=show, bars=True)
        with closing(follower), deadlines.warnings(console, cluster, session.settings):
            try:
                if not mine:
                    return follower.run(timeout)
                return self._follow_own(follower, runner, job_id, waiting)
            finally:
                waiting.stop()

    def _follow_own(self, follower: JobFollower, runner: Runner, job_id: str, waiting: Progress) -> JobResult:
        console = self.session.console
        while True:
            try:
                return follower.run()
            except KeyboardInterrupt as interrupt:
                waiting.stop()
                match _answer(console, interrupt, follower.advance):
                    case "y":
                        self._cancel(runner, job_id)
                    case "d":
                        raise Detached(job_id) from None
                    case "n":
                        console.log(f"still following job {job_id}")
                    case _:
                        console.log("\nan answer is no longer needed")
            except Exception:
                console.suggest(
                    f"job {job_id} may still be running: `cloudddp logs -f {q(job_id)}`, `cloudddp cancel "
                    f"{q(job_id)}`"
                )
                raise

    def _cancel(self, runner: Runner, job_id: str) -> NoReturn:
        console, grace = self.session.console, self.session.settings.job.stop_grace
        console.log(f"cancelling job {job_id} on every node")
        with signals.protected(lambda: console.log("still cancelling; this takes a moment")):
            done = cancel.cancel(runner, job_id, grace=grace)
        stopped = f" ({done.training.stopped})" if done.training and done.training.stopped else ""
        raise JobStopped(job_id, f"job {job_id} cancelled{f', {done.text}' if done.text else ''}{stopped}")

    def report(self, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
        session = self.session
        report_end(session, runner, cluster, finished)
        if self.suggest:
            deadlines.report_copies(session.console, session.settings, finished.job)
        if self.suggest and finished.leaving is None:
            report_new(session.console, runner, session.settings, finished)
        super().report(runner, cluster, finished)


def follower_of(
    session: Session, runner: Runner, cluster: Cluster, job_id: str, nodes: Iterable[int], **more: Any
) -> JobFollower:
    """Return a follower that reports to the console what its nodes do."""
    return JobFollower(
        runner,
        job_id,
        nodes,
        on_quiet=partial(report_quiet, session.console),
        on_silence=partial(report_silence, session.console, job_id),
        ended_instances=partial(ended_reports, session.account, cluster),
        **more,
    )


def _answer(console: Console, interrupt: KeyboardInterrupt, has_ended: Callable[[], bool]) -> str:
    """Return what to do after Ctrl-C: y, n or d as in the question; '' where the follower ended before."""
    if isinstance(interrupt, signals.HungUp):
        raise interrupt  # the terminal is closed; the job continues
    if isinstance(interrupt, signals.Terminated) or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "y"
    signals.arm()  # a second Ctrl-C is an answer, too
    try:
        question = "y: cancel, n: keep watching, d: detach, the job keeps running"
        return console.choose(f"\nCancel the job on every node? {question}", "ynd", has_ended)
    except signals.HungUp:
        raise
    except KeyboardInterrupt:
        return "y"
    except (click.Abort, OSError):  # the end of the input
        if not sys.stdin.isatty():
            raise signals.HungUp from None  # the terminal was closed at the question
        return "y"


def line_printer(
    console: Console, *, launcher: bool = False, raw: bool = False
) -> Callable[[int, int, str], None]:
    """Return a function that prints a log line as `[rank 3 | node 1] text`; ranks have colours."""
    on_terminal = sys.stdout.isatty()
    shown = str if raw else with_colours if on_terminal else without_colours
    write = write_raw if raw else console.print  # which removes colours where there is no terminal
    styled = on_terminal or not raw

    def show(node: int, rank: int, line: str) -> None:
        if rank in (LAUNCHER_RANK, SETUP_RANK):
            if launcher or rank == SETUP_RANK or is_note(line):
                who = "setup | " if rank == SETUP_RANK else "launcher | " if launcher else ""
                label = f"[{who}node {node}]"
                write(f"{click.style(label, dim=True) if styled else label} {shown(line)}")
            return
        label, colour = f"[rank {rank} | node {node}]", COLOURS[rank % len(COLOURS)]
        write(f"{click.style(label, fg=colour) if styled else label} {shown(line)}")

    return show


def is_note(line: str) -> bool:
    """Whether a line of a launcher's log is for the user: a note of an agent, which no rank's log has."""
    return line.startswith(NOTE) and not line.startswith(RESTART_NOTE)


def report_quiet(console: Console, node: int, quiet: bool) -> None:
    console.log(f"node {node} is not responding; retrying" if quiet else f"node {node} is responding again")


def report_silence(console: Console, job_id: str, silent: Silence) -> None:
    """Report that no rank has written anything, with the verb that shows what each one does."""
    step, seconds = f" ({silent.progress})" if silent.progress else "", silent.seconds
    last = f"; rank {silent.rank} was the last{step}"
    if silent.rank is None:
        last = " since the job was started"
    length = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
    exited = f"; {exited_text(silent.exited)}" if silent.exited else ""
    console.suggest(
        f"no output from any rank for {length}{last}{exited}. `cloudddp stacks {q(job_id)}` shows where each "
        "rank is"
    )


def report_started(console: Console, cluster: Cluster, settings: Config, job: NewJob) -> None:
    """Print the id of a job that was started, and report what to type next and what happens to its nodes."""
    console.print(job.id)
    console.suggest(f"next: `cloudddp logs -f {q(job.id)}`   (`cloudddp cancel {q(job.id)}` ends it)")
    deadlines.report_unfollowed(console, cluster, settings, job)


def report_detached(console: Console, left: Detached) -> int:
    """Report what to type about a job that the user has left; return the exit code."""
    console.suggest(
        f"{left}: `cloudddp logs -f {q(left.job_id)}` follows it, `cloudddp cancel {q(left.job_id)}` ends it"
    )
    return EXIT_LEFTOVERS


def report_end(session: Session, runner: Runner, cluster: Cluster, finished: JobResult) -> None:
    """Report how a job ended, and what is known about nodes that were lost."""
    console = session.console
    _report_outcome(console, finished)
    if finished.status == "failed":

        def why_missing(name: str) -> str:
            why = unsent.reason(session.root, session.settings, name)
            return why or ("" if finished.doubtful else only_elsewhere(runner, name))

        last_lines = (*finished.last_lines, finished.cause)
        why = import_advice(last_lines, session.root) or advice(
            last_error(last_lines, finished.exit_code),
            simulated=console.options.sim,
            environment=session.settings.setup.environment or listing_of(session.root),
            listed=session.settings.setup.environment is not None,
            why_missing=why_missing,
        )
        if why:
            console.log(why)
    ended = _report_ended(session, cluster, finished.doubtful)
    deadlines.report_if_passed(console, cluster, session.settings, finished.job, ended)
    if finished.rebooted:
        console.log(after_reboot(finished.job, finished.rebooted))
    unchecked = set(finished.unverified) - ended
    if finished.status == "succeeded" and (silent := {*unchecked, *finished.lost} - ended):
        console.warn(
            Message(
                f"{node_list(silent)} {'does' if len(silent) == 1 else 'do'} not respond: its ranks have "
                f"finished, but the end of its logs may be missing; `cloudddp logs {q(finished.job)}` shows "
                "them once it responds"
            )
        )
    elif unchecked:
        console.suggest(
            f"processes of the job may still run on {node_list(unchecked)}: `cloudddp cancel "
            f"{q(finished.job)}` ends them once it responds; `cloudddp resume` connects to it again, and "
            "starts the job again"
        )


def _report_outcome(console: Console, finished: JobResult) -> None:
    training = finished.training
    if finished.status == "succeeded":
        progress = f"; {training.text}" if training and training.text else ""
        ranks = "all ranks" if finished.ranks is None else plural(finished.ranks, "rank")
        restarts = f", {plural(finished.restarts, 'restart')}" if finished.restarts else ""
        length = "" if finished.seconds is None else f", {duration(finished.seconds)}"
        console.log(f"job {finished.job} finished: {ranks}{length}{restarts}{progress}")
        return
    if finished.status == "running":
        console.log(f"job {finished.job} is still running")
        return
    console.fail(f"job {finished.job} {finished.status}{f': {finished.cause}' if finished.cause else ''}")
    report_stopped(console, training)
    if finished.status == "preempted" and finished.leaving is None:
        console.log("launch it again to continue from the snapshot; the cluster must stay up until then")
    if finished.last_lines:
        console.print(click.style("its last lines:", fg="red"), err=True)
        shown = with_colours if sys.stderr.isatty() else without_colours
        for line in finished.last_lines:
            console.print(f"  | {shown(line)}", err=True)


def report_stopped(console: Console, training: TrainingStatus | None) -> None:
    """Report where a training was stopped, if it reported that."""
    if training and training.stopped:
        console.log(f"the training {training.stopped}")


def _report_ended(session: Session, cluster: Cluster, lost: Collection[int]) -> frozenset[int]:
    """Report what AWS reports about the nodes that were lost; return those whose instances have ended."""
    if not lost:
        return frozenset()
    console = session.console
    try:
        found = lookup.ended_nodes(aws := session.account.aws(), cluster, lost, stopped=True)
    except AWSError as error:
        console.warn(f"cannot find out what happened to {node_list(lost)}: {error}")
        return frozenset()
    for node, one in found.items():
        next_step = f"; {cluster.stopped_hint(node)}" if one.stopped else ""
        console.suggest(f"node {node}: AWS reports {inert(one.report)}{next_step}")
    for node, text in lookup.status_problems(aws, cluster, set(lost) - found.keys()).items():
        console.log(f"node {node}: {text}")
    return frozenset(found)
