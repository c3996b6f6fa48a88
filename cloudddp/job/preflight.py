"""`preflight`: what a launch checks before ranks start, without the user's job; and the bandwidth of
all-reduce between the nodes.

Both are a job like any other, so that there is one way to start ranks: its agents connect to each other and
compare the nodes, and its ranks measure (infra/node/bandwidth.py), or do nothing. Then the nodes forget it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import msgspec

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.cluster.connect import probe
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec, SetupSpec
from cloudddp.errors import NodeError
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
    require_efa = config.cluster.require_efa or cluster.require_efa
    config = msgspec.structs.replace(config, job=_settings(config.job), setup=SetupSpec(), data=(), shared=())
    probes = probe(runner, cluster, python=config.job.python, efa=int(require_efa))
    launch.check_nodes(cluster, probes, config, progress)
    plans = launch.plans(cluster, probes, config, job, require_efa=require_efa)
    versions = dict.fromkeys(probes, 0)  # of the project's files: any
    measured: list[Measured] = []
    try:
        start_ranks.start(runner, cluster, probes, config, plans, job, (), versions, {})
        if bandwidth:
            progress("measuring all-reduce: between the nodes of each pair, then between all")
        _follow(runner, cluster, job, measured)
    finally:
        with signals.protected(lambda: progress("still removing the check from the nodes")):
            left = cancel.abort_launch(runner, job.id, forget=True)
        if left:
            progress(f"warning: processes or records of the check may remain on {node_list(left)}")
    return sorted(measured, key=lambda one: (len(one.nodes), one.nodes))


def _follow(runner: Runner, cluster: Cluster, job: NewJob, measured: list[Measured]) -> None:
    """Follow the job to its end, and append what its ranks measure. Raises NodeError where one fails."""

    def take(_node: int, _rank: int, line: str) -> None:
        if (found := read(line)) is not None and set(found.nodes) <= cluster.nodes.keys():
            measured.append(found)

    with closing(JobFollower(runner, job.id, cluster.nodes, on_line=take)) as follower:
        result = follower.run()
    if result.status != "succeeded":
        last = "".join(f"\n  | {one_line(line)}" for line in result.last_lines)
        raise NodeError(f"the check was not completed: {result.cause or result.status}{last}")


def _settings(job: JobSpec) -> JobSpec:
    """Return the settings of the check: how ranks start on the hosts, and nothing else of the user's job."""
    python = "" if job.container else job.python  # which is a path in the image
    return JobSpec(
        python=python, env=job.env, nproc_per_node=job.nproc_per_node, rendezvous="direct", share_mb=0
    )
