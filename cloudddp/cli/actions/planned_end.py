"""The planned end of the nodes (`launch --down`) while `resume` and `watch` replace nodes that were lost: it is put off on the
nodes that are left, for a limited time, and restored if the job is not resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cli.formats import duration
from cloudddp.cli.session import Session
from cloudddp.cluster import connect, inspect
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.readiness import ready_minutes
from cloudddp.config import duration as durations
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError
from cloudddp.job import poweroff
from cloudddp.job.launch_record import LaunchRecord


def put_off_for_check(runner: Runner, seconds: float = 0.0) -> None:
    """Let no node power off until it is known whether the job is resumed, which takes `seconds` and connections."""
    poweroff.extend(runner, seconds + timing.current().failed_launch)


def put_off_for_replacement(session: Session, runner: Runner, cluster: Cluster, keep: float) -> None:
    """Let no node power off while others are replaced and the job is launched, and `keep` minutes after that."""
    spec, now = session.settings.cluster, timing.current()
    boot = ready_minutes(spec, cluster.gpus) * now.minute + now.gpus + now.torch
    poweroff.extend(
        runner, durations.seconds(spec.wait_capacity) + boot + now.launch_hold + keep * now.minute
    )


@contextmanager
def restored_after_failure(session: Session, cluster: Cluster, record: LaunchRecord) -> Iterator[None]:
    """Restore the planned end of the nodes if the block fails, that is if the job is not resumed."""
    try:
        yield
    except signals.HungUp:
        raise
    except (Exception, KeyboardInterrupt):
        if record.poweroff is not None:
            with signals.protected(
                lambda: session.console.log("still restoring the planned end of the nodes")
            ):
                _restore(session, cluster, record, record.poweroff)
        raise


def _restore(session: Session, cluster: Cluster, record: LaunchRecord, keep: float) -> None:
    left = None
    with suppress(CloudDDPError, OSError):
        found = inspect.refresh(session.aws(), cluster.name, cluster.id) or cluster
        runner, _ = connect.connect_reachable(found, session.settings.cluster)
        with closing(runner):
            plan = record.job, poweroff.keep_after_failure(keep)
            left = poweroff.restore(runner, dict.fromkeys(found.nodes, plan))
    if left is not None:
        session.console.log(
            f"the nodes that are left end by themselves in {duration(left)}: job {record.job} was launched with --down"
        )
