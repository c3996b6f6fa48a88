"""`preflight`: what a launch checks before ranks start, without the user's job; and the bandwidth of
all-reduce between the nodes.

Both are a job like any other, so that there is one way to start ranks: its agents connect to each other and
compare the nodes, and its ranks measure (infra/node/bandwidth.py), or do nothing. Then the nodes forget it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
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
from cloudddp.job.follow.decide import Policy
from cloudddp.job.follow.follower import JobFollower
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.sync import Progress
from cloudddp.text import node_list, one_line

MARK = "cloudddp-bandwidth "  # begins the lines of bandwidth.py
SLOW = 0.7  # of the median: a node whose best pair has less is slow
# The project's folder is on the path of `python -c`, before the standard library.
_CODE = "import sys; sys.path[:] = filter(None, sys.path)\n"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduce between the ranks of some nodes, or of all (`whole`): `bus` is in bytes a second, `size` in
    bytes."""

    nodes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1024)], ...], msgspec.Meta(max_length=1024)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    bus: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _Code(Script):
    """A script that ranks get as an argument, so that no file of it is on the nodes."""

    code: str = "pass"

    @property
    def argv(self) -> list[str]:
        return ["-c", self.code]


def read(line: str) -> Measured | None:
    """Return what a line of a rank's log says, None for any other line."""
    try:
        return msgspec.json.decode(line.removeprefix(MARK), type=Measured) if line.startswith(MARK) else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def slow_nodes(pairs: Sequence[Measured]) -> dict[int, float]:
    """Return the slow nodes, each with its best pair in parts of the median of all nodes: a slow node has no
    fast pair, and the others have one with each other. Of two nodes none is slower than the other. Pure."""
    nodes = sorted({node for pair in pairs for node in pair.nodes})
    best = {node: max(pair.bus for pair in pairs if node in pair.nodes) for node in nodes}
    median = statistics.median(best.values()) if len(best) > 2 else 0.0
    return {node: bus / median for node, bus in best.items() if bus < SLOW * median}


def run(
    runner: Runner, cluster: Cluster, config: Config, *, bandwidth: bool, progress: Progress
) -> list[Measured]:
    """Do the checks, and measure; nothing of it stays on the nodes. Raises CloudDDPError where a job runs,
    NodeError where a check or a rank fails."""
    code = _CODE + payload_text("infra/node/bandwidth.py") if bandwidth else "pass"
    job = NewJob(_Code("cloudddp preflight", code=code))
    require_efa = config.cluster.require_efa or cluster.require_efa
    config = _settings(config, bandwidth=bandwidth)
    probes = probe(runner, cluster, python=config.job.python, efa=int(require_efa))
    if require_efa:
        launch.check_efa(probes, tagged=cluster.require_efa)
    launch.check_nodes(cluster, probes, config, progress)
    plans = launch.plans(cluster, probes, config, job, require_efa=require_efa)
    versions = dict.fromkeys(probes, 0)  # of the project's files: any
    progress(f"checking {len(plans)} node{'s' * (len(plans) != 1)}")
    measured: list[Measured] = []
    try:
        start_ranks.start(runner, cluster, probes, config, plans, job, (), versions, {})
        if bandwidth:
            progress("measuring all-reduce: first torch is imported, then come all pairs, then all nodes")
        _follow(runner, cluster, job, measured)
    finally:
        with signals.protected(lambda: progress("still removing the check from the nodes")):
            left = cancel.abort_launch(runner, job.id, forget=True)
        if left:
            progress(f"warning: processes or records of the check may be left on {node_list(left)}")
    return sorted(measured, key=lambda one: (one.whole, one.nodes))


def _follow(runner: Runner, cluster: Cluster, job: NewJob, measured: list[Measured]) -> None:
    """Follow the job to its end, and append what its ranks measure. Raises NodeError where one fails."""

    def take(_node: int, _rank: int, line: str) -> None:
        if (found := read(line)) is not None and set(found.nodes) <= cluster.nodes.keys():
            measured.append(found)

    with closing(JobFollower(runner, job.id, cluster.nodes, Policy(), on_line=take)) as follower:
        result = follower.run()
    if result.status != "succeeded":
        last = "".join(f"\n  | {one_line(line)}" for line in result.last_lines)
        raise NodeError(f"the check was not completed: {result.cause or result.status}{last}")


def _settings(config: Config, *, bandwidth: bool) -> Config:
    """Return the settings of the job: what decides how ranks start, and nothing else of the user's job."""
    own = config.job
    job = JobSpec(
        python=own.python,
        env=own.env,
        heartbeat=own.heartbeat,
        nproc_per_node=own.nproc_per_node if bandwidth else 1,
        rendezvous=own.rendezvous if bandwidth else "direct",
        master_port=own.master_port,
        torchrun_args=own.torchrun_args,
        stall_minutes=0,
        share_mb=0,
    )
    return msgspec.structs.replace(config, job=job, setup=SetupSpec(), data=(), shared=())
