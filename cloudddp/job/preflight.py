"""`preflight`: what a launch checks before ranks start, without the user's job; and the bandwidth of
all-reduce between the nodes. It is a job like any other, whose agents compare the nodes and whose ranks
measure (infra/node/bandwidth.py), or do nothing. Then the nodes forget it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import msgspec

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec, SetupSpec
from cloudddp.errors import NodeError, StepWarning
from cloudddp.files import payload_text
from cloudddp.job import cancel, launch, start_ranks
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.sync import Progress
from cloudddp.text import node_list, one_line

MARK = "cloudddp-bandwidth "  # begins the lines of bandwidth.py
SLOW = 0.7  # of the median: a node whose best pair has less is slow
# The project's folder is on the path of `python -c`, before the standard library.
_CODE = "# preflight of cloudddp\nimport sys; sys.path[:] = filter(None, sys.path)\n"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bandwidth of all-reduce in bytes a second, between two nodes, or between all."""

    nodes: tuple[int, ...]
    bus: Annotated[float, msgspec.Meta(ge=0, le=1e15)]


def read(line: str) -> Measured | None:
    """Return what a line of a rank's log says, None for any other line."""
    try:
        return msgspec.json.decode(line.removeprefix(MARK), type=Measured) if line.startswith(MARK) else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def slow_nodes(found: Sequence[Measured]) -> dict[int, float]:
    """Return the slow nodes, each with its best pair in parts of the median of all nodes: a slow node has no
    fast pair, and the others have one with each other. Of two nodes none is slower than the other. Pure."""
    pairs = [one for one in found if len(one.nodes) == 2]
    nodes = sorted({node for pair in pairs for node in pair.nodes})
    best = {node: max(pair.bus for pair in pairs if node in pair.nodes) for node in nodes}
    median = statistics.median([*best.values()] or [0.0])
    return {node: bus / median for node, bus in best.items() if bus < SLOW * median}


def run(
    runner: Runner, cluster: Cluster, config: Config, *, bandwidth: bool, progress: Progress
) -> list[Measured]:
    """Do the checks, and measure; nothing of it stays on the nodes. Raises CloudDDPError where a job runs,
    NodeError where a check or a rank fails."""
    code = _CODE + (payload_text("infra/node/bandwidth.py") if bandwidth else "")
    job = NewJob(Script("-c", (code,)))
    # How ranks start on the hosts, and nothing else of the user's job.
    python = "" if config.job.container else config.job.python  # which is a path in the image
    env, nproc = config.job.env, config.job.nproc_per_node
    spec = JobSpec(python=python, env=env, nproc_per_node=nproc, rendezvous="direct", share_mb=0)
    config = replace(config, job=spec, setup=SetupSpec(), data=(), shared=())
    nodes = launch.checked_nodes(runner, cluster, config, progress)
    plans = launch.plans(cluster, nodes, config, job)
    measured: list[Measured] = []

    def take(_node: int, _rank: int, line: str) -> None:
        if (found := read(line)) is not None and set(found.nodes) <= cluster.nodes.keys():
            measured.append(found)

    try:
        start_ranks.start(runner, cluster, config, nodes, plans, job)
        if bandwidth:
            progress("measuring all-reduce: between the nodes of each pair, then between all")
        with closing(JobFollower(runner, job.id, cluster.nodes, on_line=take)) as follower:
            result = follower.run()
        if result.status != "succeeded":
            last = "".join(f"\n  | {one_line(line)}" for line in result.last_lines)
            raise NodeError(f"the check was not completed: {result.cause or result.status}{last}")
    finally:
        with signals.protected(lambda: progress("still removing the check from the nodes")):
            left = cancel.abort_launch(runner, job.id, forget=True)
        if left:
            progress(StepWarning(f"processes or records of the check may remain on {node_list(left)}"))
    return sorted(measured, key=lambda one: (len(one.nodes), one.nodes))
