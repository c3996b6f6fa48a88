"""JobSpec + Script -> what a node starts, with names for the facts that are known only when the job starts.
Pure.

There are two renderers: `ranks.py` puts the facts of probed nodes in, for the agent; `slurm.py` puts shell
variables in, for a script that finds the facts on each node. So both start torchrun with the same options and
ranks with the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cloudddp.config.spec import JobSpec
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
        # Exact name ('='): a plain `ens5` would also match `ens50` (NCCL docs, env.rst).
        "NCCL_SOCKET_IFNAME": ("=", Fact.INTERFACE),
        "GLOO_SOCKET_IFNAME": (Fact.INTERFACE,),
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
