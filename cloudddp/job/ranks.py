"""Nodes + JobSpec -> what to start on each node: argv, environment, rendezvous. Pure.

Three ways: torchrun with its c10d rendezvous, torchrun with static ranks, and ranks started directly with the
variables that torch.distributed's env:// reads. The agent on the node executes this plan. torchrun's options
and the variables of ranks are those of `rank_template.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cloudddp.agent.protocol.start import Process
from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job.job_request import Script
from cloudddp.job.rank_template import Fact, bind, template

# The name of AWS's plugin for NCCL. NCCL fails if it cannot use it; without this setting it uses TCP instead,
# and says so in its log only (aws-ofi-nccl, platform-aws.cpp; NCCL documentation, NCCL_NET).
_REQUIRE_EFA = {"NCCL_NET": "Libfabric"}


@dataclass(frozen=True, slots=True)
class Host:
    """The facts about one node that a job needs. `gpus` and `cpus` are as reported by the node."""

    rank: int
    private_ip: str
    interface: str
    gpus: int
    cpus: int
    python: str
    free_port: int = 29500


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Everything that one node starts for a job. `env` is shared by all its processes."""

    node: int
    env: dict[str, str]
    processes: tuple[Process, ...]
    ranks: int


def nproc(job: JobSpec, gpus: Sequence[int]) -> list[int]:
    """Return the number of ranks of each node, given the nodes' numbers of GPUs.

    Raises UsageError if a list does not fit the nodes, or if a node would run more ranks than it has GPUs,
    since two NCCL ranks cannot share one. A node without GPUs is not limited.
    """
    counts = _counts(job, gpus)
    for node, (ranks, available) in enumerate(zip(counts, gpus, strict=True)):
        if 0 < available < ranks:
            raise UsageError(
                f"node {node} has {available} GPU{'s' * (available != 1)}, fewer than the {ranks} ranks of "
                "job.nproc_per_node",
                hint="omit --nproc-per-node for one rank per GPU, or choose an instance type with more GPUs",
            )
    return counts


def _counts(job: JobSpec, gpus: Sequence[int]) -> list[int]:
    if job.nproc_per_node == "gpu":
        return [max(1, available) for available in gpus]
    if isinstance(job.nproc_per_node, int):
        return [job.nproc_per_node] * len(gpus)
    if len(job.nproc_per_node) != len(gpus):
        raise UsageError(
            f"job.nproc_per_node lists {len(job.nproc_per_node)} nodes, the cluster has {len(gpus)}",
            hint="give one number, or one per node",
        )
    return list(job.nproc_per_node)


def plan(
    job: JobSpec,
    hosts: Sequence[Host],
    script: Script,
    *,
    job_id: str,
    cluster: str,
    require_efa: bool = False,
) -> list[NodePlan]:
    """Return what each node starts, in node order.

    Raises UsageError for settings that contradict each other.
    """
    if not hosts:
        raise CloudDDPError("a job needs at least one node")
    if job.positional_ranks and job.rendezvous != "direct":
        raise UsageError(
            "job.positional_ranks requires rendezvous = 'direct': torchrun assigns the ranks itself"
        )
    counts = nproc(job, [host.gpus for host in hosts])
    port = job.master_port or hosts[0].free_port
    shared = {
        "CLOUDDDP_JOB_ID": job_id,
        "CLOUDDDP_CLUSTER": cluster,
        "CLOUDDDP_NUM_NODES": str(len(hosts)),
        "CLOUDDDP_NODE_IPS": ",".join(host.private_ip for host in hosts),
    }
    plans = []
    for host, count in zip(hosts, counts, strict=True):
        planned = template(job, script, ranks=count)
        facts = _facts(host, hosts, ranks=count, port=port, job_id=job_id)
        bound = {name: bind(word, facts) for name, word in planned.env.items()}
        efa = _REQUIRE_EFA if require_efa else {}
        env = {**shared, "CLOUDDDP_NODE_RANK": str(host.rank), **bound, **efa, **job.env}
        argv = tuple(bind(word, facts) for word in planned.rank)
        processes: tuple[Process, ...]
        if planned.launcher:
            processes = (Process(tuple(bind(word, facts) for word in planned.launcher), argv, {}),)
        else:
            first = sum(counts[: host.rank])
            master = (hosts[0].private_ip, port)
            processes = tuple(
                _direct(job, host, argv, rank=first + k, local=k, counts=counts, master=master)
                for k in range(count)
            )
        plans.append(NodePlan(host.rank, env, processes, count))
    return plans


def _facts(host: Host, hosts: Sequence[Host], *, ranks: int, port: int, job_id: str) -> dict[Fact, str]:
    return {
        Fact.PYTHON: host.python,
        Fact.NODES: str(len(hosts)),
        Fact.NODE_RANK: str(host.rank),
        Fact.ADDRESS: host.private_ip,
        Fact.INTERFACE: host.interface,
        Fact.HEAD: hosts[0].private_ip,
        Fact.IS_HEAD: "true" if host.rank == 0 else "false",
        Fact.PORT: str(port),
        Fact.RENDEZVOUS: job_id,
        Fact.THREADS: str(max(1, host.cpus // ranks)),
    }


def _direct(
    job: JobSpec,
    host: Host,
    argv: tuple[str, ...],
    *,
    rank: int,
    local: int,
    counts: Sequence[int],
    master: tuple[str, int],
) -> Process:
    if job.positional_ranks:
        argv = (*argv, str(rank), str(local))
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_WORLD_SIZE": str(counts[host.rank]),
        "GROUP_RANK": str(host.rank),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
    return Process((), argv, env)
