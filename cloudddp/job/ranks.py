"""Nodes + JobSpec -> what to start on each node: argv, environment, rendezvous. Pure.

Three ways: torchrun with its c10d rendezvous, torchrun with static ranks, and ranks started directly with the
variables that torch.distributed's env:// reads. The agent on the node executes this plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cloudddp.agent.protocol.start import Process
from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job.new_job import Script

STORE_SECONDS = 600
# The name of AWS's plugin for NCCL. NCCL fails if it cannot use it; without this setting it uses TCP instead, and says so
# in its log only (aws-ofi-nccl, platform-aws.cpp; NCCL documentation, NCCL_NET).
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

    Raises UsageError if a list does not fit the nodes, or if a node would run more ranks than it has GPUs, since two
    NCCL ranks cannot share one. A node without GPUs is not limited.
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
        efa = _REQUIRE_EFA if require_efa else {}
        env = {**shared, **_environment(job, host, count), **efa, **job.env}
        first = sum(counts[: host.rank])
        if job.rendezvous == "direct":
            processes = tuple(
                _direct(
                    job,
                    host,
                    script,
                    rank=first + k,
                    local=k,
                    counts=counts,
                    master=(hosts[0].private_ip, port),
                )
                for k in range(count)
            )
        else:
            processes = (_torchrun(job, host, script, count=count, hosts=hosts, port=port, job_id=job_id),)
        plans.append(NodePlan(host.rank, env, processes, count))
    return plans


def _longest_grace(job: JobSpec) -> float:
    """Return the most seconds that ranks may have to save. With max_restarts torchrun waits as long before each restart."""
    return job.stop_grace if job.max_restarts else max(job.stop_grace, 60 * job.save_minutes)


def _environment(job: JobSpec, host: Host, count: int) -> dict[str, str]:
    return {
        "CLOUDDDP_NODE_RANK": str(host.rank),
        "PYTHONUNBUFFERED": "1",
        # Exact name ('='): a plain `ens5` would also match `ens50` (NCCL docs, env.rst).
        "NCCL_SOCKET_IFNAME": f"={host.interface}",
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_DEBUG": "WARN",
        # torchrun would export 1 (clean up and abort); 3 leaves the flight recorder its dump.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "OMP_NUM_THREADS": str(max(1, host.cpus // count)),
        # Seconds that torchrun gives its ranks to save a snapshot when it is asked to stop (2.15 or newer; older ones
        # always 30). The agent kills both earlier where there is less time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(_longest_grace(job))),
    }


def _torchrun(
    job: JobSpec, host: Host, script: Script, *, count: int, hosts: Sequence[Host], port: int, job_id: str
) -> Process:
    master = hosts[0].private_ip
    argv = [
        host.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={count}",
        f"--max-restarts={job.max_restarts}",
        # Without it MASTER_ADDR becomes the host name of node 0, which a VPC without DNS cannot resolve.
        f"--local-addr={host.private_ip}",
    ]
    if job.rendezvous == "c10d":
        is_host = "true" if host.rank == 0 else "false"  # explicit: torchrun would guess it from host names
        argv += [
            "--rdzv-backend=c10d",
            f"--rdzv-id={job_id}",
            f"--rdzv-endpoint={master}:{port}",
            # read_timeout: of the rendezvous' store, 60 s by default. The other nodes fail if one takes longer to import
            # torch, for example from a cold disk.
            f"--rdzv-conf=is_host={is_host},read_timeout={STORE_SECONDS}",
        ]
    else:
        argv += [f"--node-rank={host.rank}", f"--master-addr={master}", f"--master-port={port}"]
    return Process((*argv, "--no-python"), (host.python, *script.argv), {})


def _direct(
    job: JobSpec,
    host: Host,
    script: Script,
    *,
    rank: int,
    local: int,
    counts: Sequence[int],
    master: tuple[str, int],
) -> Process:
    argv = [host.python, *script.argv]
    if job.positional_ranks:
        argv += [str(rank), str(local)]
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_WORLD_SIZE": str(counts[host.rank]),
        "GROUP_RANK": str(host.rank),
        "NODE_RANK": str(host.rank),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
    return Process((), tuple(argv), env)
