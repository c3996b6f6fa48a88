"""A rank that exits with code 0 while others still need it: they fail, and the verdict names the rank that
has left."""

from __future__ import annotations

import sys

import pytest
from support.agentnode import free_port
from support.gangs import Make

from cloudddp.agent.protocol.jobs import Cause

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

UNEVEN = """
import datetime, os, torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, os.environ["RANK"] == "0")
dist.init_process_group(
    "gloo", store=store, rank=int(os.environ["RANK"]), world_size=2, timeout=datetime.timedelta(seconds=20)
)
for step in range(10**6):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and step == 5:
        os._exit(0)  # as if it had fewer batches; sys.exit aborts now and then, while threads of gloo still run
"""  # noqa: E501


def test_early_exit_is_the_likely_cause_of_a_lost_connection(gangs: Make) -> None:
    """With gloo, whose other ranks fail at the next collective."""
    job = gangs(2)
    job.start(UNEVEN, UNEVEN, env={"PORT": str(free_port()), "OMP_NUM_THREADS": "1"})
    found = job.verdict().first
    assert found is not None
    assert (found.cause, found.node, found.rank) == (Cause.RANK, 0, 0)
    assert found.exited is not None
    assert (found.exited.node, found.exited.rank, found.exited.others, found.exited.likely) == (1, 1, 0, True)
