"""Nodes + JobSpec + Script -> what to start on each node: argv, environment, rendezvous. Pure.

Three ways: torchrun with its c10d rendezvous, torchrun with static ranks, and ranks started directly with the
variables that torch.distributed's env:// reads. The agent on the node executes this plan.

A template names the facts that are known only when the job starts. There are two renderers: `plan` puts the
facts of probed nodes in, for the agent; slurm.py puts shell variables in, for a script that finds the facts
on each node. So both start torchrun with the same options and ranks with the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cloudddp.agent.protocol.start import Process
from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job.job_request import Script

STORE_SECONDS = 600
# `-m torch.distributed.run` would put the current folder, which is the project, before the standard library:
# its queue.py or random.py would be imported. -P is Python 3.11.
_TORCHRUN = "import sys; sys.path[:] = filter(None, sys.path); from torch.distributed.run import main; main()"


class Fact(StrEnum):
    """What is known only when the job starts. Each value is also the name of the shell variable in a Slurm
    script."""

    PYTHON = "python"
    NODES = "nodes"  # how many
    NODE_RANK = "node_rank"
    ADDRESS = "address"  # of this node, as the other nodes reach it
    INTERFACE = "interface"  # that carries this address
    HEAD = "head"  # address of node 0
    IS_HEAD = "is_head"  # "true" on node 0, else "false"
    PORT = "port"  # of the rendezvous, on node 0
    RENDEZVOUS = "rendezvous"  # id of the rendezvous, the same on all nodes
    THREADS = "threads"  # of each rank


Word = tuple[str | Fact, ...]
"""One argument, or the value of a variable: its parts are joined."""


@dataclass(frozen=True, slots=True)
class RankTemplate:
    """What one node starts: `launcher` (torchrun) starts `rank` once for each rank; `env` is shared by all of
    them."""

    env: Mapping[str, Word]
    launcher: tuple[Word, ...]
    rank: tuple[Word, ...]


def template(job: JobSpec, script: Script, *, ranks: int) -> RankTemplate:
    """Return what a node with this many ranks starts; without a launcher for job.rendezvous = "direct"."""
    if job.rendezvous == "direct":
        return RankTemplate(_environment(job), (), ((Fact.PYTHON,), *((word,) for word in script.argv)))
    # torchrun replaces $$ by $, and $local_rank, in the arguments of ranks
    # (torch.distributed.elastic.utils.api.macros).
    escaped = ((word.replace("$", "$$"),) for word in script.argv)
    return RankTemplate(_environment(job), _torchrun(job, ranks), ((Fact.PYTHON,), *escaped))


def longest_grace(job: JobSpec) -> float:
    """Return the most seconds that ranks may have to save. With max_restarts torchrun waits as long before
    each restart."""
    return job.stop_grace if job.max_restarts else max(job.stop_grace, 60 * job.save_minutes)


def bind(word: Word, facts: Mapping[Fact, str]) -> str:
    """Return the word with the facts put in."""
    return "".join(facts[part] if isinstance(part, Fact) else part for part in word)


def _environment(job: JobSpec) -> dict[str, Word]:
    return {
        "PYTHONUNBUFFERED": ("1",),
        "PYTHONFAULTHANDLER": ("1",),  # a segmentation fault leaves its stack in the log
        # Exact name ('='): a plain `ens5` would also match `ens50` (NCCL docs, env.rst).
        "NCCL_SOCKET_IFNAME": ("=", Fact.INTERFACE),
        "GLOO_SOCKET_IFNAME": (Fact.INTERFACE,),
        "TP_SOCKET_IFNAME": (Fact.INTERFACE,),  # torch.distributed.rpc (TensorPipe)
        "NCCL_DEBUG": ("WARN",),
        # torchrun would export 1 (clean up and abort); 3 leaves the flight recorder its dump.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("3",),
        "OMP_NUM_THREADS": (Fact.THREADS,),
        # Seconds that torchrun gives its ranks to save a snapshot when it is asked to stop (2.15 or newer;
        # older ones always 30). The agent kills both earlier where there is less time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (str(math.ceil(longest_grace(job))),),
    }


def _torchrun(job: JobSpec, ranks: int) -> tuple[Word, ...]:
    argv: list[Word] = [
        (Fact.PYTHON,),
        ("-c",),
        (_TORCHRUN,),
        ("--nnodes=", Fact.NODES),
        (f"--nproc-per-node={ranks}",),
        (f"--max-restarts={job.max_restarts}",),
        # Without it MASTER_ADDR becomes the host name of node 0, which a VPC without DNS cannot resolve.
        ("--local-addr=", Fact.ADDRESS),
    ]
    if job.rendezvous == "c10d":
        argv += [
            ("--rdzv-backend=c10d",),
            ("--rdzv-id=", Fact.RENDEZVOUS),
            ("--rdzv-endpoint=", Fact.HEAD, ":", Fact.PORT),
            # is_host: explicit, since torchrun would guess it from host names. read_timeout: of the
            # rendezvous' store, 60 s by default. The other nodes fail if one takes longer to import torch,
            # for example from a cold disk.
            ("--rdzv-conf=is_host=", Fact.IS_HEAD, f",read_timeout={STORE_SECONDS}"),
        ]
    else:
        argv += [
            ("--node-rank=", Fact.NODE_RANK),
            ("--master-addr=", Fact.HEAD),
            ("--master-port=", Fact.PORT),
        ]
    return (*argv, *((word,) for word in job.torchrun_args), ("--no-python",))


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
                hint="omit --nproc-per-node for one rank per GPU, or choose an instance type with more "
                "GPUs; for ranks on the CPU: `cloudddp up -t t3.large --price 0.1 --allow-cpu`",
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
