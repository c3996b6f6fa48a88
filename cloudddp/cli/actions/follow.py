"""Following a job: its logs, silent nodes, how it ended; and cancelling it at Ctrl-C."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from typing import NoReturn, ParamSpec

import click

from cloudddp import signals, timings
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import LAUNCHER_RANK, NOTE, RESTART_NOTE, SETUP_RANK
from cloudddp.agent.protocol.last_error import last_error
from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.aws.client import AWS
from cloudddp.cli.console import Console, Progress
from cloudddp.cli.session import Session
from cloudddp.cli.views.jobs import after_reboot
from cloudddp.cluster import lookup
from cloudddp.cluster.model import Cluster
from cloudddp.errors import AWSError, Message, inert, q
from cloudddp.formats import counted, duration
from cloudddp.job import cancel, unsent
from cloudddp.job.failure_text import advice, exited_text
from cloudddp.job.follow.decide import Policy
from cloudddp.job.follow.events import Silence
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.project_scan import import_advice, listing_of
from cloudddp.operations import deadlines
from cloudddp.operations.results import ended_nodes_query, only_elsewhere
from cloudddp.text import node_list, with_colours, without_colours

P = ParamSpec("P")

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")


class JobStopped(Exception):
    """A job was stopped because of an interrupt. `cancel_again`: it may still run on some node."""

    def __init__(self, job_id: str, outcome: str, *, cancel_again: bool = False) -> None:
        super().__init__(outcome)
        self.job_id = job_id
        self.outcome = outcome
        self.cancel_again = cancel_again


class Detached(Exception):
    """The user has left a job that keeps running."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} keeps running")
        self.job_id = job_id


class Answer(enum.Enum):
    """What to do after Ctrl-C. The values are what the user types."""

    CANCEL = "y"
    WATCH = "n"
    DETACH = "d"
    ENDED = ""  # the job has, or contact was lost, before an answer


@timings.span("job")
def foreground(session: Session, runner: Runner, cluster: Cluster, job_id: str) -> JobResult:
    """Show the job's logs until it ends; return how it ended. Raises JobStopped and Detached.

    Ctrl-C asks on a terminal whether to cancel the job on every node, to leave it, or to keep watching;
    elsewhere it cancels the job. Call it inside `launch.stopped_if_interrupted`.
    """
    console, grace = session.console, session.settings.job.stop_grace
    waiting = console.progress()
    waiting(f"waiting for the first output of job {job_id}")
    follower = JobFollower(
        runner,
        job_id,
        cluster.nodes,
        Policy(),
        on_line=_after(waiting.stop, line_printer(console)),
        on_quiet=_after(waiting.stop, quiet_reporter(console)),
        on_silence=_after(waiting.stop, silence_reporter(console, job_id)),
        bars=True,
        ended_instances=ended_nodes_query(session.aws, cluster),
    )
    cancel_now = partial(_cancel_now, console, runner, job_id, grace)
    with closing(follower), deadlines.warnings(console, cluster, session.settings):
        try:
            return _followed(follower, console, job_id, waiting, cancel_now)
        finally:
            waiting.stop()


def _after(first: Callable[[], None], then: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls both: a spinner must end before other output."""

    def both(*args: P.args, **kwargs: P.kwargs) -> None:
        timings.mark("first line")
        first()
        then(*args, **kwargs)

    return both


def _followed(
    follower: JobFollower,
    console: Console,
    job_id: str,
    waiting: Progress,
    cancel_now: Callable[[], NoReturn],
) -> JobResult:
    while True:
        try:
            return follower.run()
        except KeyboardInterrupt as interrupt:
            waiting.stop()
            match _answer(console, interrupt, follower.has_ended):
                case Answer.CANCEL:
                    cancel_now()
                case Answer.DETACH:
                    raise Detached(job_id) from None
                case Answer.WATCH:
                    console.log(f"still following job {job_id}")
                case Answer.ENDED:
                    console.log("\nno answer is needed any more")
        except Exception:
            console.suggest(
                f"job {job_id} may still be running: `cloudddp logs -f {q(job_id)}`, `cloudddp cancel "
                f"{q(job_id)}`"
            )
            raise


def _answer(console: Console, interrupt: KeyboardInterrupt, has_ended: Callable[[], bool]) -> Answer:
    if isinstance(interrupt, signals.HungUp):
        raise interrupt  # the terminal is closed; the job continues
    if isinstance(interrupt, signals.Terminated) or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return Answer.CANCEL
    signals.arm()  # a second Ctrl-C is an answer, too
    try:
        answer = console.choose(
            "\nCancel the job on every node? y: cancel, n: keep watching, d: detach, the job keeps running",
            [one.value for one in Answer if one is not Answer.ENDED],
            has_ended,
        )
        return Answer(answer)
    except signals.HungUp:
        raise
    except KeyboardInterrupt:
        return Answer.CANCEL
    except (click.Abort, OSError):  # the end of the input
        if not sys.stdin.isatty():
            raise signals.HungUp from None  # the terminal was closed at the question
        return Answer.CANCEL


def _cancel_now(console: Console, runner: Runner, job_id: str, grace: float) -> NoReturn:
    console.log(f"cancelling job {job_id} on every node")
    with signals.protected(lambda: console.log("still cancelling; this takes a moment")):
        done = cancel.cancel(runner, job_id, grace=grace)
    stopped = f" ({done.training.stopped})" if done.training and done.training.stopped else ""
    raise JobStopped(job_id, f"job {job_id} cancelled{f', {done.text}' if done.text else ''}{stopped}")


def line_printer(
    console: Console,
    *,
    launcher: bool = False,
    shown: Callable[[str], str] | None = None,
    write: Callable[[str], None] | None = None,
) -> Callable[[int, int, str], None]:
    """Return a function that prints a log line as `[rank 3 | node 1] text`; each rank has its colour on a
    terminal."""
    shown = shown or (with_colours if sys.stdout.isatty() else without_colours)
    styled = write is None or sys.stdout.isatty()  # click removes colours elsewhere
    write = write or console.print

    def show(node: int, rank: int, line: str) -> None:
        if rank in (LAUNCHER_RANK, SETUP_RANK):
            if launcher or rank == SETUP_RANK or is_note(line):
                who = "setup | " if rank == SETUP_RANK else "launcher | " if launcher else ""
                label = f"[{who}node {node}]"
                write(f"{click.style(label, dim=True) if styled else label} {shown(line)}")
            return
        label = f"[rank {rank} | node {node}]"
        colour = COLOURS[rank % len(COLOURS)]
        write(f"{click.style(label, fg=colour) if styled else label} {shown(line)}")

    return show


def is_note(line: str) -> bool:
    """Whether a line of a launcher's log is for the user: a note of an agent, which no rank's log has."""
    return line.startswith(NOTE) and not line.startswith(RESTART_NOTE)


def quiet_reporter(console: Console) -> Callable[[int, bool], None]:
    def report(node: int, quiet: bool) -> None:
        console.log(
            f"node {node} is not responding; retrying" if quiet else f"node {node} is responding again"
        )

    return report


def silence_reporter(console: Console, job_id: str) -> Callable[[Silence], None]:
    """Return a function that reports that no rank has written anything, with the verb that shows what each
    one does."""

    def report(silent: Silence) -> None:
        step = f" ({silent.progress})" if silent.progress else ""
        last = (
            " since the job was started"
            if silent.rank is None
            else f"; rank {silent.rank} was the last{step}"
        )
        exited = f"; {exited_text(silent.exited)}" if silent.exited else ""
        console.suggest(
            f"no output from any rank for {_length(silent.seconds)}{last}{exited}. `cloudddp stacks "
            f"{q(job_id)}` shows where each rank is"
        )

    return report


def _length(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


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
    ended = _report_ended(console, session.aws, cluster, finished.doubtful)
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
        ranks = "all ranks" if finished.ranks is None else counted(finished.ranks, "rank")
        restarts = f", {counted(finished.restarts, 'restart')}" if finished.restarts else ""
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


def _report_ended(
    console: Console, connect: Callable[[], AWS], cluster: Cluster, lost: Collection[int]
) -> frozenset[int]:
    """Report what AWS reports about the nodes that were lost; return those whose instances have ended."""
    if not lost:
        return frozenset()
    try:
        aws = connect()
        found = lookup.ended_nodes(aws, cluster, lost, stopped=True)
    except AWSError as error:
        console.warn(f"cannot find out what happened to {node_list(lost)}: {error}")
        return frozenset()
    for node, one in found.items():
        next_step = f"; {cluster.stopped_hint(node)}" if one.stopped else ""
        console.suggest(f"node {node}: AWS reports {inert(one.report)}{next_step}")
    for node, text in lookup.status_problems(aws, cluster, set(lost) - found.keys()).items():
        console.log(f"node {node}: {text}")
    return frozenset(found)
