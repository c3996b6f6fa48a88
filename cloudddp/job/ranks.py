"""Nodes + JobSpec + Script -> what to start on each node: argv, environment, rendezvous, by torchrun with its
c10d rendezvous or with static ranks, or directly with the variables that env:// reads. Pure.

A template has placeholders for what is known only when the job starts. `plan` puts in what is known of probed
nodes, for the agent; slurm.py puts in shell variables, for a script that finds them on each node: so both
start torchrun with the same options and ranks with the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.start import Container, Process, SharedFolder, StartReply
from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job.job_request import Script

STORE_SECONDS = 600
# `-m torch.distributed.run` would put the current folder, which is the project, before the standard library:
# its queue.py or random.py would be imported. -P is Python 3.11.
_TORCHRUN = "import sys; sys.path[:] = filter(None, sys.path); from torch.distributed.run import main; main()"


class Placeholder(StrEnum):
    """What is known only when the job starts. Each value also names a shell variable of a Slurm script."""

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


Word = tuple[str | Placeholder, ...]
"""One argument, or the value of a variable: its parts are joined."""


@dataclass(frozen=True, slots=True)
class RankTemplate:
    """What one node starts: `launcher` (torchrun) starts each `rank`; `env` is shared by all of them."""

    env: Mapping[str, Word]
    launcher: tuple[Word, ...]
    rank: tuple[Word, ...]


def template(job: JobSpec, script: Script, *, ranks: int) -> RankTemplate:
    """Return what a node with this many ranks starts; without a launcher for job.rendezvous = "direct"."""
    if job.rendezvous == "direct":
        return RankTemplate(
            _environment(job), (), ((Placeholder.PYTHON,), *((word,) for word in script.argv))
        )
    # torchrun replaces $$ by $, and $local_rank, in the arguments of ranks
    # (torch.distributed.elastic.utils.api.macros).
    escaped = ((word.replace("$", "$$"),) for word in script.argv)
    return RankTemplate(_environment(job), _torchrun(job, ranks), ((Placeholder.PYTHON,), *escaped))


def bind(word: Word, values: Mapping[Placeholder, str]) -> str:
    return "".join(values[part] if isinstance(part, Placeholder) else part for part in word)


def _environment(job: JobSpec) -> dict[str, Word]:
    # With max_restarts torchrun waits as long before each restart.
    grace = job.stop_grace if job.max_restarts else max(job.stop_grace, 60 * job.save_minutes)
    return {
        "PYTHONUNBUFFERED": ("1",),
        "PYTHONFAULTHANDLER": ("1",),  # a segmentation fault leaves its stack in the log
        # Exact name ('='): a plain `ens5` would also match `ens50` (NCCL docs, env.rst).
        "NCCL_SOCKET_IFNAME": ("=", Placeholder.INTERFACE),
        "GLOO_SOCKET_IFNAME": (Placeholder.INTERFACE,),
        "TP_SOCKET_IFNAME": (Placeholder.INTERFACE,),  # torch.distributed.rpc (TensorPipe)
        "NCCL_DEBUG": ("WARN",),
        # torchrun would export 1 (clean up and abort); 3 leaves the flight recorder its dump.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("3",),
        "OMP_NUM_THREADS": (Placeholder.THREADS,),
        # Seconds that torchrun gives its ranks to save a snapshot when it is asked to stop (2.15 or newer;
        # older ones always 30). The agent kills both earlier where there is less time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (str(math.ceil(grace)),),
    }


def _torchrun(job: JobSpec, ranks: int) -> tuple[Word, ...]:
    argv: list[Word] = [
        (Placeholder.PYTHON,),
        ("-c",),
        (_TORCHRUN,),
        ("--nnodes=", Placeholder.NODES),
        (f"--nproc-per-node={ranks}",),
        (f"--max-restarts={job.max_restarts}",),
        # Without it MASTER_ADDR becomes the host name of node 0, which a VPC without DNS cannot resolve.
        ("--local-addr=", Placeholder.ADDRESS),
    ]
    if job.rendezvous == "c10d":
        argv += [
            ("--rdzv-backend=c10d",),
            ("--rdzv-id=", Placeholder.RENDEZVOUS),
            ("--rdzv-endpoint=", Placeholder.HEAD, ":", Placeholder.PORT),
            # is_host: explicit, since torchrun would guess it from host names. read_timeout: of the
            # rendezvous' store, 60 s by default. The other nodes fail if one takes longer to import torch,
            # for example from a cold disk.
            ("--rdzv-conf=is_host=", Placeholder.IS_HEAD, f",read_timeout={STORE_SECONDS}"),
        ]
    else:
        argv += [
            ("--node-rank=", Placeholder.NODE_RANK),
            ("--master-addr=", Placeholder.HEAD),
            ("--master-port=", Placeholder.PORT),
        ]
    return (*argv, *((word,) for word in job.torchrun_args), ("--no-python",))


# The name of AWS's plugin for NCCL. NCCL fails if it cannot use it; without this setting it uses TCP instead,
# and says so in its log only (aws-ofi-nccl, platform-aws.cpp; NCCL documentation, NCCL_NET).
_REQUIRE_EFA = {"NCCL_NET": "Libfabric"}


@dataclass(slots=True)
class LaunchNode:
    """A node of the cluster on which a job is launched, and what has become known of it."""

    rank: int
    address: str
    probe: ProbeReply
    version: int = 0  # of the project's files
    shared: tuple[SharedFolder, ...] = ()
    container: Container | None = None  # in which ranks run
    start_reply: StartReply | None = None


PYTHON = "python3"  # of an image, where job.python is empty


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node (by its rank in the cluster) starts; `env` is shared by all its processes."""

    node: int
    env: dict[str, str]
    processes: tuple[Process, ...]
    ranks: int


def nproc(job: JobSpec, gpus: Sequence[int]) -> list[int]:
    """Return the number of ranks of each node, given the nodes' numbers of GPUs. Raises UsageError if a list
    does not fit the nodes, or if a node with GPUs would run more ranks than it has: two NCCL ranks cannot
    share one."""
    if job.nproc_per_node == "gpu":
        counts = [max(1, available) for available in gpus]
    elif isinstance(job.nproc_per_node, int):
        counts = [job.nproc_per_node] * len(gpus)
    elif len(job.nproc_per_node) == len(gpus):
        counts = [*job.nproc_per_node]
    else:
        raise UsageError(
            f"job.nproc_per_node lists {len(job.nproc_per_node)} nodes, the cluster has {len(gpus)}",
            hint="give one number, or one per node",
        )
    for node, (ranks, available) in enumerate(zip(counts, gpus, strict=True)):
        if 0 < available < ranks:
            raise UsageError(
                f"node {node} has {available} GPU{'s' * (available != 1)}, fewer than the {ranks} ranks of "
                "job.nproc_per_node",
                hint="omit --nproc-per-node for one rank per GPU, or choose an instance type with more "
                "GPUs; for ranks on the CPU: `cloudddp up -t t3.large --price 0.1 --allow-cpu`",
            )
    return counts


def plan(
    job: JobSpec,
    nodes: Sequence[LaunchNode],
    script: Script,
    *,
    job_id: str,
    cluster: str,
    require_efa: bool = False,
) -> list[NodePlan]:
    """Return what each node starts. Nodes of a job are numbered from 0, also where the cluster has lost some
    of its nodes. Raises UsageError for settings that contradict each other."""
    if not nodes:
        raise CloudDDPError("a job needs at least one node")
    if job.positional_ranks and job.rendezvous != "direct":
        raise UsageError(
            "job.positional_ranks requires rendezvous = 'direct': torchrun assigns the ranks itself"
        )
    counts = nproc(job, [one.probe.gpus for one in nodes])
    head, port = nodes[0].address, job.master_port or nodes[0].probe.free_port
    plans = []
    for number, (one, count) in enumerate(zip(nodes, counts, strict=True)):
        values = {
            Placeholder.PYTHON: (job.python or PYTHON) if job.container else one.probe.python or job.python,
            Placeholder.NODES: str(len(nodes)),
            Placeholder.NODE_RANK: str(number),
            Placeholder.ADDRESS: one.address,
            Placeholder.INTERFACE: one.probe.interface,
            Placeholder.HEAD: head,
            Placeholder.IS_HEAD: "false" if number else "true",
            Placeholder.PORT: str(port),
            Placeholder.RENDEZVOUS: job_id,
            Placeholder.THREADS: str(max(1, one.probe.cpus // count)),
        }
        planned = template(job, script, ranks=count)
        env = {
            "CLOUDDDP_JOB_ID": job_id,
            "CLOUDDDP_CLUSTER": cluster,
            "CLOUDDDP_NUM_NODES": str(len(nodes)),
            "CLOUDDDP_NODE_IPS": ",".join(node.address for node in nodes),
            "CLOUDDDP_NODE_RANK": str(number),
            **{name: bind(word, values) for name, word in planned.env.items()},
            **(_REQUIRE_EFA if require_efa else {}),
            **job.env,
        }
        argv = tuple(bind(word, values) for word in planned.rank)
        if planned.launcher:
            processes = [Process(tuple(bind(word, values) for word in planned.launcher), argv, {})]
        else:
            processes = []
            for local in range(count):
                rank = sum(counts[:number]) + local
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(sum(counts)),
                    "LOCAL_WORLD_SIZE": str(count),
                    "GROUP_RANK": str(number),
                    "MASTER_ADDR": head,
                    "MASTER_PORT": str(port),
                }
                positional = (str(rank), str(local)) if job.positional_ranks else ()
                processes.append(Process((), (*argv, *positional), own))
        plans.append(NodePlan(one.rank, env, tuple(processes), count))
    return plans
