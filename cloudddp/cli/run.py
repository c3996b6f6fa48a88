"""`run`: up + launch + pull + down in one, with the teardown whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudddp.cli import clusters
from cloudddp.cli.common import Session, verb, yes_option
from cloudddp.cli.jobs import foreground, guarded, job_settings, prepare, start_job
from cloudddp.cli.say import counted, note, size

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import Cluster
    from cloudddp.errors import Leftovers
    from cloudddp.nodes import Runner
    from cloudddp.spec import Config
    from cloudddp.watch import Finished


@verb("run", passes_arguments=True)
@clusters.cluster_settings
@yes_option
@job_settings
def run(
    session: Session, yes: bool, module: bool, variables: tuple[str, ...], script: str, args: tuple[str, ...]
) -> int:
    """up + launch + pull + down: the whole job, and nothing left whatever happens.

    \b
    Example:
      cloudddp run -n 2 -t g5.12xlarge --max-cost 20 train.py --epochs 10
    """
    from cloudddp import cluster, job
    from cloudddp.errors import CloudDDPError, Interrupted

    settings, wanted = prepare(session, module, variables, script, args, fresh=True)
    aws = session.aws(settings)
    if any(c.nodes for c in cluster.find(aws, settings.cluster.name)):
        raise CloudDDPError(
            f"cluster {settings.cluster.name!r} is there already; `run` makes and removes its own",
            hint="use `cloudddp launch`, or another name with -c",
        )
    made: Cluster | None = None
    finished: Finished | None = None
    try:
        made = clusters.bring_up(session, settings, yes=yes).cluster
        job_id = job.new_id()
        with session.open(settings) as (found, runner), guarded(runner, job_id):
            start_job(runner, found, settings, wanted, session, job_id)
            try:
                finished = foreground(session, runner, found, settings, job_id)
            finally:
                if finished is None or finished.state != "unknown":
                    _bring_back(session, runner, settings, job_id)
    except Interrupted as interrupted:
        interrupted.message = interrupted.message.replace(
            "; the cluster is still up", "; the cluster is taken down"
        )
        interrupted.hint = ""
        raise
    finally:
        if made is not None:
            _end(session, settings, made, finished)
    return finished.exit_code


def _end(session: Session, settings: Config, made: Cluster, finished: Finished | None) -> None:
    """Take the nodes away, or say which are left and why. Raises Leftovers, which outweighs the job's exit code."""
    from cloudddp import teardown
    from cloudddp.errors import Leftovers

    with teardown.undisturbed(lambda _: note("still taking everything down; it takes a moment")):
        try:
            if (
                finished is not None
                and finished.state == "unknown"
                and _still_live(session.aws(settings), made)
            ):
                raise _left_alone(made)
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


def _bring_back(session: Session, runner: Runner, settings: Config, job_id: str) -> None:
    """Bring results home before the nodes go; a failure here must not stop the teardown."""
    from cloudddp import job, results
    from cloudddp.errors import CloudDDPError

    try:
        record = job.find(job.jobs(runner), job_id)
        to = session.root / job.RESULTS / job_id
        pulled = results.pull(runner, settings.job.outputs, node=record.rank_zero or 0, to=to)
        for line in pulled.notes:
            note(f"warning: {line}")
        if pulled.files:
            note(f"{counted(pulled.files, 'file')}, {size(pulled.size)}, brought to {to}")
        else:
            note(f"warning: no results: nothing is in {', '.join(settings.job.outputs)} on the nodes")
    except (CloudDDPError, OSError) as error:
        note(f"warning: results were not brought back: {error}")


COMMANDS = (run,)
