"""The agents of several nodes that run one job: real processes, real signals, real connections. Whatever
ends, all ranks end with it, and every node keeps the same verdict."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
from support.agentnode import FOREVER, WAITING, alive, until
from support.gangs import Gangs, Make, freeze, kill, thaw

from cloudddp.agent.protocol.jobs import MAX_LINES, Cause, ConcludeRequest, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

TALKING = "for number in range(60): print('line', number, flush=True)\n"
LAST_LINES = tuple(f"line {number}" for number in range(60 - MAX_LINES, 60))
STUBBORN = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n" + FOREVER
)


def launched(code: str, node: Gangs, number: int, rank: int) -> list[Process]:
    """A rank below a launcher that waits for it, as torchrun does, and ends with its exit code."""
    script = node[number].script(code)
    return [Process(("sh", "-c", '"$@"; exit $?', "sh"), (sys.executable, script), {"RANK": str(rank)})]


# -- a rank --------------------------------------------------------------------------------------------------


def test_job_succeeds_once_every_rank_of_every_node_has_exited_with_0(gangs: Make) -> None:
    job = gangs(3)
    replies = job.start(["pass", "pass"], "pass", "pass")
    assert [reply.unreachable for reply in replies.values()] == [None] * 3
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    assert [[rank.exit_code for rank in state.ranks] for state in job.states()] == [[0, 0], [0], [0]]


def test_killed_rank_ends_all_ranks(gangs: Make) -> None:
    job = gangs(3)
    job.start([FOREVER] * 2, [FOREVER, TALKING + FOREVER], FOREVER)
    until(lambda: b"line 59" in job.log(1, 3))
    ranks = [pid for number in range(3) for pid in job.pids(number).ranks]
    os.kill(job.pid(1, 3), signal.SIGKILL)
    first = Failure(1, Cause.RANK, 3, 137, signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first, LAST_LINES)
    assert not any(map(alive, ranks))


def test_rank_that_fails_is_named_with_its_last_lines(gangs: Make) -> None:
    job, failing = gangs(2), 1
    code = TALKING + WAITING + "raise SystemExit(7)\n"
    job.start(*[code if number == failing else FOREVER for number in range(2)])
    job.pids(1 - failing)
    (job[failing].project / "go").touch()
    first = Failure(failing, Cause.RANK, failing, 7)
    assert job.verdict() == Verdict(JobPhase.FAILED, 7, 0, first, LAST_LINES)
    ended = {rank.rank: rank for state in job.states() for rank in state.ranks}
    assert (ended[1 - failing].signal, ended[1 - failing].asked) == (signal.SIGTERM, True)


def test_rank_that_ignores_sigterm_is_killed(gangs: Make) -> None:
    job = gangs(2)
    job.start(STUBBORN, FOREVER, grace=600.0)
    until(lambda: b"ready" in job.log(0, 0))
    job.pids(0)
    os.kill(job.pid(1, 1), signal.SIGKILL)
    assert job.verdict().first == Failure(1, Cause.RANK, 1, 137, signal.SIGKILL)
    assert job.states(0)[0].ranks[0].signal == signal.SIGKILL


def test_job_goes_on_after_a_rank_that_exits_with_0(gangs: Make) -> None:
    job = gangs(2)
    job.start("pass", WAITING + "raise SystemExit(3)\n")
    until(lambda: [rank.exit_code for rank in job[0].state().ranks] == [0])
    supervisors = [job[number].supervisor_pid() for number in (0, 1)]
    assert alive(job.pid(1, 1))
    assert all(map(alive, supervisors))
    (job[1].project / "go").touch()
    found = job.verdict()
    assert (found.phase, found.exit_code) == (JobPhase.FAILED, 3)
    assert (found.first and found.first.rank) == 1


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
    job, killed = gangs(2), 1
    job.start_requests(
        {
            job[number]: job[number].starting(processes=launched(FOREVER, job, number, number), gang=job.gang)
            for number in range(2)
        }
    )
    pids = [job.pids(number) for number in range(2)]
    kill(pids[killed].launchers[0])
    first = Failure(killed, Cause.LAUNCHER, exit_code=137, signal=signal.SIGKILL)
    assert job.verdict() == Verdict(JobPhase.FAILED, 137, 0, first)
    assert not any(alive(pid) for one in pids for pid in one.ranks)


def test_killed_supervisor_ends_all_ranks(gangs: Make) -> None:
    """Its guard records the same first cause. It is the node that would decide."""
    job, killed = gangs(3), 0
    job.start(FOREVER, FOREVER, FOREVER)
    left = [number for number in range(3) if number != killed]
    ranks = [pid for number in range(3) for pid in job.pids(number).ranks]
    kill(job[killed].supervisor_pid())
    found = job.verdict(*left)
    assert found == Verdict(JobPhase.FAILED, 1, left[0], Failure(killed, Cause.AGENT))
    assert job.verdict(killed) == replace(found, decided_by=killed)
    assert not any(map(alive, ranks))


def test_killed_guard_ends_all_ranks(gangs: Make) -> None:
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    job.pids(0)
    kill(job.pids(1).guard)
    found = job.verdict()
    assert found.first is not None
    assert (found.exit_code, found.first.node, found.first.cause) == (1, 1, Cause.AGENT)


@pytest.mark.parametrize(("killed", "wrappers"), [(0, False), (1, True)])
def test_ranks_end_where_nothing_of_the_agent_is_left(gangs: Make, killed: int, wrappers: bool) -> None:
    """The kernel ends them. Nobody records that there, and the other nodes agree."""
    job = gangs(3)
    job.start(*[[FOREVER, STUBBORN] if wrappers else [FOREVER] * 2] * 3)
    pids = [job.pids(number) for number in range(3)]
    kill(*(pids[killed].of_cloudddp if wrappers else [pids[killed].guard, pids[killed].supervisor]))
    left = [number for number in range(3) if number != killed]
    found = job.verdict(*left)
    assert found == Verdict(JobPhase.FAILED, 1, left[0], Failure(killed, Cause.AGENT))
    job.gone()
    assert not any(alive(pid) for one in pids for pid in one.ranks)
    assert job[killed].state().phase is JobPhase.LOST
    request = ConcludeRequest(job[killed].id(), found)
    assert [job[number].call(request).recorded for number in (*left, killed, killed)] == [
        *[False] * len(left),
        True,
        False,
    ]
    assert job.verdict() == found
    assert {(state.ended, state.verdict and state.verdict.at) for state in job.states()} == {
        (found.at, found.at)
    }


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


def test_launchers_that_wait_for_each_other_after_all_ranks_have_finished_are_ended(gangs: Make) -> None:
    """As torchrun does at its exit barrier."""
    job = gangs(2)
    launcher = ("sh", "-c", '"$@"; exec sleep 1000', "sh")
    job.start_requests(
        {
            node: node.starting(
                processes=[Process(launcher, ("true",), {"RANK": str(node.number)})], gang=job.gang
            )
            for node in job.nodes
        }
    )
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)


# -- a cancel, a node that is frozen -------------------------------------------------------------------------


def test_cancel_on_one_node_cancels_the_job_on_all(gangs: Make) -> None:
    job = gangs(2)
    job.start([FOREVER] * 2, FOREVER)
    for number in range(2):
        job.pids(number)
    assert job[1].cancel().left == 0
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


def test_frozen_node_is_lost_and_ends_with_the_same_verdict_when_thawed(gangs: Make) -> None:
    job, frozen = gangs(3, silence=2.0), 2
    job.start(FOREVER, FOREVER, FOREVER)
    pids = [job.pids(number) for number in range(3)]
    there = [*pids[frozen].of_cloudddp, *pids[frozen].ranks]
    freeze(*there)
    left = [number for number in range(3) if number != frozen]
    found = job.verdict(*left)
    assert found == Verdict(JobPhase.FAILED, 1, left[0], Failure(frozen, Cause.SILENT, peer=left[0]))
    assert all(map(alive, there))
    thaw(*there)
    assert job.verdict() == found
    assert not any(map(alive, there))
    assert {state.ended for state in job.states()} == {found.at}, "the end is when the verdict was given"
