"""The planned end of the nodes (`launch --down`) while `resume` and `watch` replace nodes that were lost: it
is put off on the nodes that are left, for a limited time, and restored if the job is not resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cli.session import Session
from cloudddp.cluster import connect, lookup
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.wait_ready import ready_minutes
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, seconds_of
from cloudddp.errors import CloudDDPError
from cloudddp.formats import duration
from cloudddp.job import poweroff
from cloudddp.job.poweroff import PutOff

Least = dict[str, float]  # seconds, by job


def put_off_for_check(put_off: PutOff, runner: Runner, seconds: float = 0.0) -> None:
    """Let no node power off until it is known whether the job is resumed, which takes `seconds` and
    connections."""
    put_off.extend(runner, seconds + timing.current().failed_launch)


def put_off_for_replacement(
    put_off: PutOff, spec: ClusterSpec, runner: Runner, cluster: Cluster, keep: float
) -> None:
    """Let no node power off while others are replaced and the job is launched, and `keep` minutes after
    that."""
    now = timing.current()
    boot = ready_minutes(spec, cluster.gpus) * now.minute + now.gpus + now.torch
    put_off.extend(runner, seconds_of(spec.wait_capacity) + boot + now.launch_hold + keep * now.minute)


@contextmanager
def restored_after_failure(session: Session, cluster: Cluster, put_off: PutOff) -> Iterator[Least]:
    """Restore what was put off if the block fails, that is if no job is resumed. The block adds to the
    dictionary that it gets how many seconds the nodes of a job are to be left at least."""
    least: Least = {}
    try:
        yield least
    except signals.HungUp:
        raise
    except (Exception, KeyboardInterrupt):
        restore(session, cluster, put_off, least)
        raise


def restore(session: Session, cluster: Cluster, put_off: PutOff, least: Least) -> None:
    """Let the nodes power off as it was planned before, and say when. Never fails."""
    plans = put_off.plans(least)
    if not plans:
        return
    left = None
    with (
        signals.protected(lambda: session.console.log("still restoring the planned end of the nodes")),
        suppress(CloudDDPError, OSError),
    ):
        found = lookup.refresh(session.aws(), cluster.name, cluster.id) or cluster
        runner, _ = connect.connect_reachable(found, session.settings.cluster)
        with closing(runner):
            left = poweroff.restore(runner, plans)
    if left is not None:
        job = next(iter(plans.values()))[0]
        session.console.log(
            f"the nodes that are left end by themselves in {duration(left)}: job {job} was launched with "
            "--down"
        )
