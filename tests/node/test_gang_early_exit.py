"""A rank that exits with code 0 while others still need it: they fail, and the verdict names the rank that
has left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.agentnode import FOREVER, WAITING, free_port, until
from support.gangs import Gangs, Make

from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.job.failure_text import sentence

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


def failure(job: Gangs) -> Failure:
    found = job.verdict()
    assert found.phase is JobPhase.FAILED
    assert found.first is not None
    return found.first


def test_early_exit_is_the_likely_cause_of_a_lost_connection(gangs: Make) -> None:
    """With gloo, whose other ranks fail at the next collective."""
    job = gangs(2)
    job.start(UNEVEN, UNEVEN, env={"PORT": str(free_port()), "OMP_NUM_THREADS": "1"})
    found = failure(job)
    assert (found.cause, found.node, found.rank) == (Cause.RANK, 0, 0)
    assert found.exited is not None
    assert (found.exited.node, found.exited.rank, found.exited.others, found.exited.likely) == (1, 1, 0, True)
    words = "rank 1 on node 1 exited with code 0 while other ranks were still running, the likely cause: "
    assert sentence(found).startswith(words)
    assert "later rank 0 on node 0 exited with code 1" in sentence(found)


def test_rank_that_exits_with_0_when_it_is_asked_to_end_is_no_early_exit(gangs: Make) -> None:
    job = gangs(2)
    obedient = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\nprint('ready', flush=True)\n"
    )
    job.start(obedient + FOREVER, WAITING + "exit('Connection reset by peer')")
    until(lambda: b"ready" in job.log(0, 0))
    (job[1].project / "go").touch()
    first = Failure(1, Cause.RANK, 1, 1)
    assert job.verdict() == Verdict(JobPhase.FAILED, 1, 0, first, ("Connection reset by peer",))
    assert job[0].state().ranks[0].exit_code == 0


def test_stall_names_a_rank_that_has_exited(gangs: Make, tmp_path: Path) -> None:
    job = gangs(2)
    job.start("pass", "import time\ntime.sleep(1000)", stall_minutes=0.05)
    found = failure(job)
    assert found.cause is Cause.STALL
    assert found.exited is not None
    assert found.exited.rank == 0
    assert sentence(found).startswith(
        "rank 0 on node 0 exited with code 0 while other ranks were still running"
    )
