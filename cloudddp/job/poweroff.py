"""The plan of the nodes' end (`launch --down`): after how much time without a use it comes. Root's timer on
each node decides (infra/node/cloudddp-idle.sh), also if this computer vanishes."""

from __future__ import annotations

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import CLIENT_SECONDS, PowerOffReply, PowerOffRequest
from cloudddp.cluster import nodes_end
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import PlannedEnd
from cloudddp.config import timing
from cloudddp.job.job_request import NewJob
from cloudddp.job.status import JobRecord
from cloudddp.ssh.fleet import Outcome


def plan(
    runner: Runner, cluster: Cluster, job: str, minutes: float, clients: float = CLIENT_SECONDS
) -> Outcome[PowerOffReply]:
    """Let the nodes end once they have been unused for so many minutes, because of a job; connections prolong
    that by at most `clients` seconds. A node on which another job runs replies with that one only."""
    nodes_end.note(cluster.id, PlannedEnd(job, minutes))
    request = PowerOffRequest(job, minutes * timing.current().minute, clients)
    return runner.each(lambda node: client.call(runner, node, request), fatal=lambda _: False)


def plan_before_start(runner: Runner, cluster: Cluster, job: NewJob) -> None:
    """Let nodes end also if a job with --down is never started. Raises NodeError."""
    if job.poweroff is not None:
        plan(runner, cluster, job.id, _until_started(job.poweroff)).all()


def _until_started(minutes: float) -> float:
    """Whoever reads of a failure needs time to do something."""
    return max(minutes, timing.current().failed_launch / timing.current().minute)


def note_started(cluster: Cluster, job: NewJob) -> None:
    """Record that the nodes have replaced their plan by that of a job whose ranks run, or removed it."""
    nodes_end.note(cluster.id, None if job.poweroff is None else PlannedEnd(job.id, job.poweroff))


def hold(runner: Runner, cluster: Cluster, job: JobRecord | None, seconds: float) -> None:
    """Before others are replaced, let nodes with a plan stay for those: for so many seconds where this
    connection lives, and as after a launch that has failed where it does not. `job`: as the nodes know it,
    whose agents may have written a plan after a stall. Never raises."""
    known = nodes_end.planned(cluster.id)
    if known is None and job is not None and job.grace is not None:
        known = PlannedEnd(job.id, job.grace / timing.current().minute)
    if known is not None:
        plan(runner, cluster, known.job, _until_started(known.minutes), max(seconds, CLIENT_SECONDS))
