"""`run`: up + launch + pull + down in one, with the teardown whatever happens."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from cloudddp.cli import clusters
from cloudddp.cli.collect import Left, collect
from cloudddp.cli.common import Session, verb, yes_option
from cloudddp.cli.jobs import foreground, guarded, job_settings, prepare, start_job
from cloudddp.cli.own_flags import JobCommand
from cloudddp.cli.say import counted, dollars, note, toml

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.aws.discover import TypeInfo
    from cloudddp.cluster import Cluster
    from cloudddp.errors import Leftovers
    from cloudddp.nodes import Runner
    from cloudddp.spec import Config
    from cloudddp.watch import Finished


@verb("run", passes_arguments=True, cls=JobCommand)
@clusters.cluster_settings
@yes_option
@click.option(
    "--discard", is_flag=True, help="Terminate the nodes even if they hold files that were not pulled."
)
@job_settings
def run(
    session: Session,
    yes: bool,
    discard: bool,
    module: bool,
    variables: tuple[str, ...],
    script: str,
    args: tuple[str, ...],
) -> int:
    """up + launch + pull + down: the whole job, and nothing left whatever happens.

    Results in job.outputs are pulled to results/JOB. If the job has left other new files on the nodes, or a result
    cannot be pulled, the cluster is kept until its deadline, and the exit code is 3.

    \b
    Example:
      cloudddp run -n 2 -t g5.12xlarge --max-cost 20 train.py --epochs 10
    """
    from cloudddp import cluster, job, results
    from cloudddp.errors import CloudDDPError, Interrupted

    settings, wanted = prepare(session, module, variables, script, args, fresh=True)
    results.check_target(session.root / job.RESULTS, hint="make it a folder that you can write, or remove it")
    aws = session.aws(settings)
    if any(c.nodes for c in cluster.find(aws, settings.cluster.name)):
        raise CloudDDPError(
            f"cluster {settings.cluster.name!r} is there already; `run` makes and removes its own",
            hint="use `cloudddp launch`, or another name with -c",
        )
    made: Cluster | None = None
    ending = _Ending(discard)
    try:
        made = clusters.bring_up(session, settings, yes=yes, check=lambda info: _fits(settings, info)).cluster
        job_id = job.new_id()
        with session.open(settings) as (found, runner):
            try:
                with guarded(runner, job_id):
                    start_job(runner, found, settings, wanted, session, job_id)
                    ending.finished = foreground(session, runner, found, settings, job_id)
            finally:
                _collect(session, runner, found, settings, job_id, ending)
    except Interrupted as interrupted:
        interrupted.message = interrupted.message.replace(
            "; the cluster is still up", "; the cluster is taken down"
        )
        interrupted.hint = ""
        raise
    finally:
        if made is not None:
            _end(session, settings, made, ending)
    return ending.finished.exit_code


@dataclass(slots=True)
class _Ending:
    """What decides whether the nodes may be terminated: how the job ended, and what they still hold."""

    discard: bool
    finished: Finished | None = None
    left: Left | None = None

    @property
    def unknown(self) -> bool:
        return self.finished is not None and self.finished.state == "unknown"


def _collect(
    session: Session, runner: Runner, made: Cluster, settings: Config, job_id: str, ending: _Ending
) -> None:
    """Pull results before the nodes are terminated. A job that may still run is ended first."""
    from cloudddp import cluster, job
    from cloudddp.errors import AWSError

    if ending.unknown:
        return
    if ending.finished is None:
        job.end_started(runner, job_id, grace=settings.job.stop_grace)
    ended: dict[int, str] = {}
    if ending.finished is not None and ending.finished.lost:
        with contextlib.suppress(AWSError):
            ended = cluster.fates(session.aws(settings), made, ending.finished.lost)
    ending.left = collect(session, runner, settings, job_id, ended)


def _fits(settings: Config, info: TypeInfo) -> None:
    """Raise UsageError where a node would run more ranks than the instance type has GPUs."""
    from cloudddp import ranks

    ranks.nproc(settings.job, [info.gpus] * settings.cluster.nodes)


def _end(session: Session, settings: Config, made: Cluster, ending: _Ending) -> None:
    """Take the nodes away, or say which are left and why. Raises Leftovers, which outweighs the job's exit code."""
    from cloudddp import teardown
    from cloudddp.errors import Leftovers

    with teardown.undisturbed(lambda _: note("still taking everything down; it takes a moment")):
        try:
            if ending.unknown and _still_live(session.aws(settings), made):
                raise _left_alone(made)
            if ending.left is not None and ending.left.lines:
                _keep(settings, made, ending.left, discard=ending.discard)
            report = clusters.take_down(session, settings, made.id)
        except Leftovers:
            raise
        except Exception as error:  # whatever it is: the user must hear of the nodes, not of a bug
            ids = ", ".join(node.id for node in made.nodes)
            hour = made.node_hour
            bill = "at a price unknown" if hour is None else f"costing ${hour * len(made.nodes):.2f} an hour"
            raise Leftovers(
                f"it is not certain that {ids} have ended, {bill}, until {_deadline(made)}: {error}",
                hint="repeat `cloudddp down` until it says that nothing is left",
            ) from None
    note(clusters.describe_down(report, settings.cluster.name, simulated=session.sim))


def _deadline(made: Cluster) -> str:
    return f"{made.expires:%Y-%m-%d %H:%M} UTC" if made.expires else "their deadline"


def _still_live(aws: AWS, made: Cluster) -> bool:
    """Return whether the nodes are there as far as anyone can tell."""
    from cloudddp.aws import inventory
    from cloudddp.errors import CloudDDPError

    try:
        return any(node.live for node in inventory.instances(aws, inventory.with_id(made.id)))
    except CloudDDPError:
        return True


def _left_alone(made: Cluster) -> Leftovers:
    """Nothing is torn down from a computer that cannot see the nodes: the job and its results may be well."""
    from cloudddp.errors import Leftovers

    return Leftovers(
        f"contact with every node was lost, so the {counted(len(made.nodes), 'node')} were left running; "
        f"they end themselves at {_deadline(made)}",
        hint="with a network again: cloudddp allow-me, then cloudddp logs -f, cloudddp pull, cloudddp down",
    )


def _keep(settings: Config, made: Cluster, left: Left, *, discard: bool) -> None:
    """Raise Leftovers, naming what the nodes hold and what they cost; with `discard`, only warn."""
    from cloudddp.errors import Leftovers
    from cloudddp.text import one_line

    listed = "".join(f"\n  {one_line(line, 1000)}" for line in left.lines)
    if discard:
        note(f"warning: not pulled, and discarded with the nodes:{listed}")
        return
    hour = made.node_hour
    bill = "at an unknown price" if hour is None else f"at {dollars(hour * len(made.nodes))} an hour"
    raise Leftovers(
        f"cluster {made.name} is kept until its deadline, {_deadline(made)}, {bill}: "
        f"not all files that the job wrote were pulled{listed}",
        hint=f"{left.pull}, then cloudddp down. Next time name such files in [job] outputs of cloudddp.toml "
        f"(now {toml(settings.job.outputs)}), or in [job] scratch if nobody needs them; --discard terminates the nodes anyway",
    )


COMMANDS = (run,)
