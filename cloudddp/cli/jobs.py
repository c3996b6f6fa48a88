"""The verbs on jobs: launch, logs, jobs, cancel."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cloudddp.cli import deadlines
from cloudddp.cli.collect import report_new
from cloudddp.cli.common import Session, anyone_option, dry_run_option, json_option, setting, verb
from cloudddp.cli.own_flags import JobCommand
from cloudddp.cli.say import Progress, counted, duration, named, note
from cloudddp.text import with_colours, without_colours

if TYPE_CHECKING:
    from cloudddp.cluster import Cluster
    from cloudddp.job import JobRecord
    from cloudddp.nodes import Runner
    from cloudddp.ranks import Script
    from cloudddp.spec import Config
    from cloudddp.watch import Finished, Watch

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
LAUNCHER = -1


def job_settings(function: Any) -> Any:
    """The flags that shape a job, for `launch` and `run`."""
    for decorate in reversed(
        [
            click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for `python -m`."),
            setting("job", "nproc_per_node", "--nproc-per-node", metavar="K"),
            setting("job", "rendezvous", "--rendezvous", metavar="HOW"),
            click.option(
                "--env", "-e", "variables", multiple=True, metavar="K=V", help="Set a variable in every rank."
            ),
            click.argument("script"),
            click.argument("args", nargs=-1, type=click.UNPROCESSED),
        ]
    ):
        function = decorate(function)
    return function


def prepare(
    session: Session,
    module: bool,
    variables: tuple[str, ...],
    script: str,
    args: tuple[str, ...],
    *,
    rehearsed: bool = False,
    fresh: bool = False,
) -> tuple[Config, Script]:
    """Return settings and script, checked. Raises UsageError before anything is called."""
    from cloudddp import job
    from cloudddp.errors import UsageError
    from cloudddp.ranks import Script

    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals:
            raise UsageError(f"--env {variable!r} has no '='", hint="for example --env NCCL_DEBUG=INFO")
        session.flag("--env", "job", "env", {name: value})
    settings = session.settings(rehearsed=rehearsed)
    return settings, job.prepare(
        session.root, Path.cwd(), Script(script, args, module), settings, fresh=fresh
    )


@verb("launch", passes_arguments=True, cls=JobCommand)
@click.option("-d", "--detach", is_flag=True, help="Start the job and return; `cloudddp logs -f` follows it.")
@anyone_option
@dry_run_option
@job_settings
def launch(
    session: Session,
    detach: bool,
    dry_run: bool,
    module: bool,
    variables: tuple[str, ...],
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT with ARGS on every node: sync the project, start the ranks, show their logs.

    The exit code is the job's own: that of the rank which failed first.

    \b
    Examples:
      cloudddp launch train.py --epochs 10
      cloudddp launch --nproc-per-node 4 -m train.main --epochs 10
    """
    settings, wanted = prepare(session, module, variables, script, args, rehearsed=dry_run)
    if dry_run:
        from cloudddp.cli import rehearsal

        rehearsal.launch(settings, wanted, session.root)
        return 0
    from cloudddp import job

    job_id = job.new_id()
    with session.open(settings, whole=True) as (cluster, runner):
        with guarded(runner, job_id):
            start_job(runner, cluster, settings, wanted, session, job_id)
            if detach:
                click.echo(job_id)
                note(f"next: cloudddp logs -f {job_id}   (cloudddp cancel {job_id} ends it)")
                return 0
            finished = foreground(session, runner, cluster, settings, job_id)
        if not finished.lost:
            report_new(runner, settings, job_id)
    if finished.lost:
        note("next: cloudddp status; with the nodes that are left: cloudddp pull, cloudddp down")
    elif finished.exit_code:
        note("the cluster is still up; cloudddp down ends the bill")
    return finished.exit_code


@contextlib.contextmanager
def guarded(runner: Runner, job_id: str) -> Iterator[None]:
    """End the job where Ctrl-C comes before anybody watches it: while it is started, or right after."""
    from cloudddp import interrupts, job, teardown
    from cloudddp.errors import Interrupted

    try:
        yield
    except interrupts.HungUp:
        raise
    except KeyboardInterrupt:
        with teardown.undisturbed(lambda _: note("still ending what was started; it takes a moment")):
            unsure = job.end_started(runner, job_id)
        known = "it was ended" if not unsure else f"it may still run on node {', '.join(map(str, unsure))}"
        raise Interrupted(
            f"interrupted while job {job_id} was being started; {known}; the cluster is still up",
            hint=f"cloudddp cancel {job_id}, and again if need be"
            if unsure
            else "cloudddp down ends the bill",
        ) from None


def start_job(
    runner: Runner, cluster: Cluster, settings: Config, script: Script, session: Session, job_id: str
) -> None:
    """Start the job. Call inside `guarded`."""
    from cloudddp import job

    deadlines.warn(cluster)
    with Progress() as say:
        job.launch(runner, cluster, settings, script, root=session.root, say=say, job_id=job_id)


def foreground(session: Session, runner: Runner, cluster: Cluster, settings: Config, job_id: str) -> Finished:
    """Show the job's logs to its end; Ctrl-C asks once and cancels it everywhere. Return how it ended.

    Call inside `guarded`.
    """
    from cloudddp.watch import Watch

    watch = Watch(
        runner,
        job_id,
        range(len(cluster.nodes)),
        on_line=printer(),
        on_quiet=_tell_quiet,
        fates=deadlines.fates(session, settings, cluster),
    )
    try:
        return _watched(watch, session, runner, cluster, settings, job_id)
    finally:
        watch.close()


def _watched(
    watch: Watch, session: Session, runner: Runner, cluster: Cluster, settings: Config, job_id: str
) -> Finished:
    began = time.monotonic()
    while True:
        try:
            finished = watch.run(
                stop_on_failure=True,
                stop_on_loss=True,
                grace=settings.job.stop_grace,
            )
        except KeyboardInterrupt as interrupt:
            if _wants_cancel(interrupt):
                _cancel_now(runner, job_id, settings)
        except Exception:
            note(f"job {job_id} may still be running: cloudddp logs -f {job_id}, cloudddp cancel {job_id}")
            raise
        else:
            _report(finished, time.monotonic() - began)
            ended = _tell_fates(session, settings, cluster, finished.lost) if finished.lost else frozenset()
            deadlines.report_ended(cluster, settings, job_id, ended)
            _tell_unchecked(finished, set(finished.survivors) - ended)
            return finished


def _tell_fates(session: Session, settings: Config, cluster: Cluster, lost: Iterable[int]) -> frozenset[int]:
    """Say what AWS knows of the nodes that were lost; returns those whose instances have ended."""
    from cloudddp import cluster as clusters
    from cloudddp.errors import AWSError

    try:
        fates = clusters.fates(session.aws(settings), cluster, lost)
    except AWSError as error:
        note(f"warning: what became of {named(lost)} is not known: {error}")
        return frozenset()
    for node, fate in fates.items():
        note(f"node {node}: AWS says {fate}")
    return frozenset(fates)


def _tell_unchecked(finished: Finished, nodes: Iterable[int]) -> None:
    if nodes:
        note(f"not checked that every process is gone on {named(nodes)}: cloudddp cancel {finished.job}")


def _wants_cancel(interrupt: KeyboardInterrupt) -> bool:
    from cloudddp import interrupts

    if isinstance(interrupt, interrupts.HungUp):
        raise interrupt  # the terminal is gone; the job is not ours to end
    if type(interrupt) is not KeyboardInterrupt or not sys.stdin.isatty():
        return True
    interrupts.arm()  # a second Ctrl-C is an answer, too
    try:
        return click.confirm("\nCancel the job on every node?", default=True, err=True)
    except (click.Abort, KeyboardInterrupt):
        return True


def _cancel_now(runner: Runner, job_id: str, settings: Config) -> NoReturn:
    from cloudddp import job, teardown
    from cloudddp.errors import Interrupted

    note(f"cancelling job {job_id} on every node")
    with teardown.undisturbed(lambda _: note("still cancelling; it takes a moment")):
        done = job.cancel(runner, job_id, grace=settings.job.stop_grace)
    left_off = f" ({done.standing.stopped})" if done.standing and done.standing.stopped else ""
    raise Interrupted(
        f"job {job_id} cancelled{f', {done.text}' if done.text else ''}{left_off}; the cluster is still up",
        hint="cloudddp down ends the bill",
    )


def printer(only: frozenset[int] | None = None, launcher: bool = False) -> Callable[[int, int, str], None]:
    """Return what prints a log line as `[rank 3 | node 1] text`, in a colour a rank on a terminal."""

    shown = with_colours if sys.stdout.isatty() else without_colours

    def show(node: int, rank: int, line: str) -> None:
        if rank == LAUNCHER:
            if launcher:
                click.echo(click.style(f"[launcher | node {node}]", dim=True) + f" {shown(line)}")
            return
        if only is None or rank in only:
            label = click.style(f"[rank {rank} | node {node}]", fg=COLOURS[rank % len(COLOURS)])
            click.echo(f"{label} {shown(line)}")

    return show


def _tell_quiet(node: int, quiet: bool) -> None:
    note(f"nothing is heard of node {node}; trying on" if quiet else f"node {node} is heard again")


def _report(finished: Finished, seconds: float) -> int:
    """Say how the job ended, and return its exit code."""
    standing = finished.standing
    if finished.state == "succeeded":
        reached = f"; {standing.text}" if standing and standing.text else ""
        note(f"job {finished.job} finished: {counted(finished.ranks, 'rank')}, {duration(seconds)}{reached}")
        return 0
    if finished.state == "running":
        note(f"job {finished.job} is still running")
        return 0
    cause = f": {finished.cause}" if finished.cause else ""
    click.secho(f"cloudddp: job {finished.job} {finished.state}{cause}", fg="red", err=True)
    if standing and standing.stopped:
        note(f"the training {standing.stopped}")
    if finished.state == "preempted":
        note("the same launch goes on from there, as long as these nodes are up")
    if finished.last_lines:
        click.secho("its last lines:", err=True)
        shown = with_colours if sys.stderr.isatty() else without_colours
        for line in finished.last_lines:
            click.echo(f"  | {shown(line)}", err=True)
    return finished.exit_code


@verb("logs")
@anyone_option
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until the job ends; the exit code is then the job's."
)
@click.option(
    "--rank", "only", multiple=True, type=int, metavar="R", help="This rank alone; may be repeated."
)
def logs(session: Session, job_id: str | None, follow: bool, only: tuple[int, ...]) -> int:
    """Show the logs of a job (the newest by default), from its beginning."""
    from cloudddp import job
    from cloudddp.errors import CloudDDPError
    from cloudddp.watch import Watch

    settings = session.settings()
    with session.open(settings, partly=True) as (found, runner):
        record = job.find(job.jobs(runner), job_id)
        if record.state == "setup":
            raise CloudDDPError(
                f"job {record.id} is still in its set-up and has no logs yet",
                hint=f"repeat this when `cloudddp jobs` shows it running; `cloudddp cancel {record.id}` ends it",
            )
        _check_ranks(only, record, found)
        show = printer(frozenset(only) if only else None, launcher=session.verbose)
        watch = Watch(
            runner,
            record.id,
            record.nodes,
            on_line=show,
            on_quiet=_tell_quiet,
            wait=follow,
            fates=deadlines.fates(session, settings, found),
        )
        try:
            finished = watch.run(stop_on_failure=follow, grace=settings.job.stop_grace)
        except KeyboardInterrupt:
            note(f"the job goes on; cloudddp cancel {record.id} ends it")
            raise
        if not follow:
            return 0
        code = _report(finished, record.seconds)
        ended = _tell_fates(session, settings, found, finished.lost) if finished.lost else frozenset()
        deadlines.report_ended(found, settings, record.id, ended)
        _tell_unchecked(finished, set(finished.survivors) - ended)
        return code


def _check_ranks(only: tuple[int, ...], record: JobRecord, found: Cluster) -> None:
    """Raise UsageError for a rank that the job does not have, if every node has reported how many it runs."""
    from cloudddp.errors import UsageError

    known = not found.missing and set(record.nodes) == set(range(len(found.nodes)))
    for rank in only if known else ():
        if not 0 <= rank < record.ranks:
            raise UsageError(
                f"job {record.id} has no rank {rank}",
                hint="its only rank is 0" if record.ranks == 1 else f"its ranks are 0 to {record.ranks - 1}",
            )


@verb("jobs")
@anyone_option
@json_option
def jobs(session: Session, as_json: bool) -> None:
    """List the jobs of the cluster, newest last: how they stand, and where their training is."""
    from cloudddp import job
    from cloudddp.cli import jobtable

    settings = session.settings()
    with session.open(settings, partly=True) as (_, runner):
        jobtable.show(job.jobs(runner), as_json=as_json)


@verb("cancel")
@anyone_option
@click.argument("job_id", metavar="[JOB]", required=False)
def cancel(session: Session, job_id: str | None) -> None:
    """End a job (the newest by default): every rank on every node. The cluster stays up."""
    from cloudddp import job

    settings = session.settings()
    with session.open(settings, partly=True) as (_, runner):
        record = job.find(job.jobs(runner), job_id)
        done = job.cancel(runner, record.id, grace=settings.job.stop_grace)
        if done.text:
            click.echo(f"job {record.id}: {done.text}")
            if done.standing and done.standing.stopped:
                note(f"the training {done.standing.stopped}")
        else:
            click.echo(f"job {record.id}: it had ended already ({record.state})")


COMMANDS = (launch, logs, jobs, cancel)
