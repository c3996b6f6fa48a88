"""The agents of several nodes that run one job: real processes, real signals, real connections. Whatever
ends, all ranks end with it, and every node keeps the same verdict."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import replace

import pytest
from support.agentnode import FOREVER, WAITING, alive, until
from support.gangs import Make, freeze, kill, thaw

from cloudddp.agent.protocol.jobs import MAX_LINES, Cause, ConcludeRequest, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

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


# -- restarts: the whole gang or nothing ---------------------------------------------------------------------


# Each attempt adds a line to this file of its node; the ranks of the first attempt wait to be ended.
COUNTED = """
import os, time
with open('attempts', 'a') as file:
    print(os.environ['CLOUDDDP_ATTEMPT'], os.getpid(), file=file, flush=True)
while os.environ['CLOUDDDP_ATTEMPT'] == '0': time.sleep(0.02)
"""
# It loses a connection in the first attempt, which is another failure than those of the later ones, without
# a word.
FAILS = """
import os, sys
with open(os.environ['CLOUDDDP_STATUS_FILE'], 'w') as file: file.write('{"step": 120}')
if os.environ['CLOUDDDP_ATTEMPT'] == '0': print('RuntimeError: Connection closed by peer [172.31.0.5]:29400')
sys.exit(3)
"""


def test_all_ranks_start_again_after_one_was_killed(gangs: Make) -> None:
    job = gangs(2)
    job.start(COUNTED, COUNTED, retries=1)
    first = [job.pid(node, node) for node in range(2)]
    for node in job.nodes:
        until((node.project / "attempts").exists)
    kill(first[1])
    verdict = job.verdict()
    assert (verdict.phase, verdict.restarts) == (JobPhase.SUCCEEDED, 1)
    for node in job.nodes:
        attempts = [line.split() for line in (node.project / "attempts").read_text().splitlines()]
        assert [one[0] for one in attempts] == ["0", "1"]
        assert int(attempts[0][1]) == first[node.number]
    assert not any(map(alive, first))


def test_failure_at_the_same_step_is_not_repeated_and_has_the_lines_of_its_own_attempt(gangs: Make) -> None:
    job = gangs(2)
    job.start(FAILS, "import time; time.sleep(600)", retries=4)
    verdict = job.verdict()
    assert (verdict.restarts, verdict.refusal) == (3, "the same failure has occurred 3 times at step 120")
    assert verdict.first is not None
    assert (verdict.first.exit_code, verdict.last_lines) == (3, ())
    assert b"Connection closed by peer" in job.log(0, 0)


# -- a supervisor that ends by an error of its own, as on a full disk ----------------------------------------


def no_files(pid: int) -> None:
    """Let a process write no more to any file: as on a full disk, but for this process alone."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))


def test_error_of_a_supervisor_is_in_the_verdict_on_every_node(gangs: Make) -> None:
    """The job is started again, which each supervisor records."""
    crashed = 1
    job = gangs(2)
    job.start(FOREVER, FOREVER, retries=1)
    pids = [job.pids(number) for number in range(2)]
    no_files(pids[crashed].supervisor)
    os.kill(pids[1].ranks[0], signal.SIGKILL)
    found = job.verdict(1 - crashed)
    assert found.first is not None
    assert (found.first.node, found.first.cause) == (crashed, Cause.AGENT)
    assert found.first.detail == "OSError: [Errno 27] File too large"
    assert job.verdict(crashed).first == found.first
    assert (
        json.loads((job.nodes[crashed].folder() / "masked.json").read_text())["detail"] == found.first.detail
    )
