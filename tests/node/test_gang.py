"""The agents of several nodes that run one job: real processes, real signals, real connections. Whatever
ends, all ranks end with it, and every node keeps the same verdict."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
from support.agentnode import FOREVER, WAITING, alive, until
from support.gangs import Make, freeze, kill, thaw

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process
from cloudddp.agent.protocol.verdict import MAX_LINES, Cause, ConcludeRequest, Failure, Verdict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

TALKING = "for number in range(60): print('line', number, flush=True)\n"
LAST_LINES = tuple(f"line {number}" for number in range(60 - MAX_LINES, 60))
STUBBORN = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n" + FOREVER
)


# -- a rank --------------------------------------------------------------------------------------------------


def test_job_succeeds_once_every_rank_of_every_node_has_exited_with_0(gangs: Make) -> None:
    job = gangs(2)
    replies = job.start(["pass", "pass"], "pass")
    assert [reply.unreachable for reply in replies.values()] == [None] * 2
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    assert [[rank.exit_code for rank in state.ranks] for state in job.states()] == [[0, 0], [0]]


def test_killed_rank_ends_all_ranks(gangs: Make) -> None:
    job = gangs(2)
    job.start(FOREVER, [FOREVER, TALKING + FOREVER])
    until(lambda: b"line 59" in job.log(1, 2))
    ranks = [pid for number in range(2) for pid in job.pids(number).ranks]
    os.kill(job.pid(1, 2), signal.SIGKILL)
    first = Failure(1, Cause.RANK, 2, 137, signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first, LAST_LINES)
    assert not any(map(alive, ranks))
    (other,) = job.states(0)[0].ranks
    assert (other.signal, other.asked) == (signal.SIGTERM, True)


def test_job_goes_on_after_a_rank_that_exits_with_0_and_names_it_if_another_one_fails(gangs: Make) -> None:
    job = gangs(2)
    job.start("pass", WAITING + "exit('Connection reset by peer')\n")
    until(lambda: [rank.exit_code for rank in job[0].state().ranks] == [0])
    assert alive(job.pid(1, 1))
    (job[1].project / "go").touch()
    found = job.verdict()
    assert (found.exit_code, found.last_lines) == (1, ("Connection reset by peer",))
    assert found.first is not None
    assert found.first.rank == 1
    assert found.first.exited is not None
    assert (found.first.exited.rank, found.first.exited.likely) == (0, True)


def test_rank_that_exits_with_0_when_it_is_asked_to_end_is_no_early_exit(gangs: Make) -> None:
    job = gangs(2)
    obeys = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\nprint('ready', flush=True)\n"
    job.start(obeys + FOREVER, WAITING + "exit('Connection reset by peer')")
    until(lambda: b"ready" in job.log(0, 0))
    (job[1].project / "go").touch()
    first = Failure(1, Cause.RANK, 1, 1)
    assert job.verdict() == Verdict(JobPhase.FAILED, 1, 0, first, ("Connection reset by peer",))
    assert job[0].state().ranks[0].exit_code == 0


def test_ranks_that_cannot_start_end_the_others(gangs: Make) -> None:
    job = gangs(2)
    requests = {
        job[0]: job[0].starting(FOREVER, gang=job.gang),
        job[1]: job[1].starting(processes=[Process(("/no/such/python",), ("x",), {})], gang=job.gang),
    }
    job.start_requests(requests)
    found = job.verdict()
    assert found.first is not None
    assert (found.exit_code, found.first.node, found.first.cause) == (127, 1, Cause.START)
    assert "/no/such/python" in found.first.detail


# -- the launcher, the agent ---------------------------------------------------------------------------------


def test_killed_launcher_ends_all_ranks(gangs: Make) -> None:
    """The last lines are those of the rank below it."""
    job, launcher = gangs(2), ("sh", "-c", '"$@"; exit $?', "sh")
    job.start_requests(
        {
            node: node.starting(
                processes=[
                    Process(launcher, (sys.executable, node.script(TALKING + FOREVER)), {"RANK": str(number)})
                ],
                gang=job.gang,
            )
            for number, node in enumerate(job.nodes)
        }
    )
    pids = [job.pids(number) for number in range(2)]
    until(lambda: b"line 59" in job.log(1, 1))
    kill(pids[1].launchers[0])
    first = Failure(1, Cause.LAUNCHER, exit_code=137, signal=signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first, LAST_LINES)
    assert not any(alive(pid) for one in pids for pid in one.ranks)


def test_killed_supervisor_ends_all_ranks(gangs: Make) -> None:
    """Its guard records the same first cause. It is the node that would decide."""
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    ranks = [pid for number in range(2) for pid in job.pids(number).ranks]
    kill(job[0].supervisor_pid())
    found = job.verdict(1)
    assert found == Verdict(JobPhase.FAILED, 1, 1, Failure(0, Cause.AGENT))
    assert job.verdict(0) == replace(found, decided_by=0)
    assert not any(map(alive, ranks))


def test_ranks_end_where_nothing_of_the_agent_is_left(gangs: Make) -> None:
    """The kernel ends them. Nobody records that there, and the other nodes agree."""
    job = gangs(3)
    job.start([FOREVER, STUBBORN], FOREVER, FOREVER)
    pids = [job.pids(number) for number in range(3)]
    kill(*pids[0].of_cloudddp)
    found = job.verdict(1, 2)
    assert found == Verdict(JobPhase.FAILED, 1, 1, Failure(0, Cause.AGENT))
    job.gone()
    assert not any(alive(pid) for one in pids for pid in one.ranks)
    assert job[0].state().phase is JobPhase.LOST
    request = ConcludeRequest(job[0].id(), found)
    assert [job[number].call(request).recorded for number in (1, 2, 0, 0)] == [False, False, True, False]
    assert job.verdict() == found
    assert {state.ended for state in job.states()} == {found.at}


def test_agent_that_the_machine_asks_to_end_ends_all_ranks(gangs: Make) -> None:
    """As a shutdown does, which sends SIGTERM to every process."""
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    job.pids(0)
    os.kill(job.pids(1).guard, signal.SIGTERM)
    found = job.verdict()
    assert found.first is not None
    assert (found.first.node, found.first.cause) == (1, Cause.AGENT)
    assert "SIGTERM" in found.first.detail


# -- a cancel, a node that is frozen -------------------------------------------------------------------------


def test_cancel_on_one_node_cancels_the_job_on_all(gangs: Make) -> None:
    job = gangs(2)
    job.start([FOREVER] * 2, FOREVER)
    for number in range(2):
        job.pids(number)
    assert job[1].cancel().left == 0
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


def test_frozen_node_is_lost_and_ends_with_the_same_verdict_when_thawed(gangs: Make) -> None:
    job = gangs(2, silence=2.0)
    job.start(FOREVER, FOREVER)
    pids = [job.pids(number) for number in range(2)]
    there = [*pids[1].of_cloudddp, *pids[1].ranks]
    freeze(*there)
    found = job.verdict(0)
    assert found == Verdict(JobPhase.FAILED, 1, 0, Failure(1, Cause.SILENT, peer=0))
    assert all(map(alive, there))
    thaw(*there)
    assert job.verdict() == found
    assert not any(map(alive, there))
    assert {state.ended for state in job.states()} == {found.at}, "the end is when the verdict was given"
