"""The agents of several nodes that run one job: real processes, signals and connections. No rank starts
before all are connected; whatever ends, all ranks end with it, and every node keeps the same verdict."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from support.agentnode import FOREVER, STUBBORN, alive, first_of, free_port, until
from support.gangs import Gangs, Make, freeze, kill, thaw
from support.programs import program

from cloudddp.agent.protocol.jobs import MAX_LINES, Cause, ConcludeRequest, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

TALKING = "for number in range(60): print('line', number, flush=True)\n"
LAST_LINES = tuple(f"line {number}" for number in range(60 - MAX_LINES, 60))


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
    """Its guard records the same first cause, and how it was killed. It is the node that would decide."""
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    ranks = [pid for number in range(2) for pid in job.pids(number).ranks]
    kill(job[0].supervisor_pid())
    found = job.verdict(1)
    assert found == Verdict(JobPhase.FAILED, 1, 1, Failure(0, Cause.AGENT))
    killed = Failure(0, Cause.AGENT, detail="it was killed by SIGKILL")
    assert job.verdict(0) == replace(found, decided_by=0, first=killed)
    assert "killed by SIGKILL" in (job[0].folder() / "supervisor.log").read_text()
    assert not any(map(alive, ranks))


def test_ranks_end_where_nothing_of_the_agent_is_left(gangs: Make) -> None:
    """The kernel ends them, and the next step what they have started in a session of its own. Nobody records
    that there, and the other nodes agree."""
    job = gangs(3)
    leaves = f"import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n{FOREVER}"
    job.start([leaves, STUBBORN], FOREVER, FOREVER)
    pids = [job.pids(number) for number in range(3)]
    kill(*pids[0].of_cloudddp)
    found = job.verdict(1, 2)
    assert found == Verdict(JobPhase.FAILED, 1, 1, Failure(0, Cause.AGENT))
    assert not any(alive(pid) for one in pids for pid in one.ranks)
    assert job[0].state().phase is JobPhase.LOST
    job.gone()
    for node in (1, 2, 0, 0):
        job[node].call(ConcludeRequest(job[0].id(), found))
    assert job.verdict() == found
    assert {state.ended for state in job.states()} == {found.at}


def test_agent_that_the_machine_asks_to_end_ends_all_ranks(gangs: Make) -> None:
    """As a shutdown does, which sends SIGTERM to every process."""
    job = gangs(2)
    job.start(FOREVER, FOREVER)
    job.pids(0)
    os.kill(job.pids(1).guard, signal.SIGTERM)
    first = first_of(job.verdict())
    assert (first.node, first.cause) == (1, Cause.AGENT)
    assert "SIGTERM" in first.detail


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
    assert (first_of(verdict).exit_code, verdict.last_lines) == (3, ())
    assert b"Connection closed by peer" in job.log(0, 0)


# -- a supervisor that ends by an error of its own, as on a full disk ----------------------------------------


def test_error_of_a_supervisor_is_in_the_verdict_on_every_node(gangs: Make) -> None:
    """The job is started again, which each supervisor records; this one can write to no file."""
    crashed = 1
    job = gangs(2)
    job.start(FOREVER, FOREVER, retries=1)
    pids = [job.pids(number) for number in range(2)]
    resource.prlimit(pids[crashed].supervisor, resource.RLIMIT_FSIZE, (0, 0))
    os.kill(pids[1].ranks[0], signal.SIGKILL)
    first = first_of(job.verdict(1 - crashed))
    assert first == Failure(crashed, Cause.AGENT, detail="OSError: [Errno 27] File too large")
    assert job.verdict(crashed).first == first
    masked = json.loads((job.nodes[crashed].folder() / "masked.json").read_text())
    assert masked["detail"] == first.detail


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
    found = first_of(job.verdict())
    assert (found.cause, found.node, found.rank) == (Cause.RANK, 0, 0)
    assert found.exited is not None
    assert (found.exited.node, found.exited.rank, found.exited.others, found.exited.likely) == (1, 1, 0, True)


# -- the beginning -------------------------------------------------------------------------------------------


def assert_no_rank_has_started(job: Gangs, *nodes: int) -> None:
    for number in nodes:
        assert list((job[number].folder() / "ranks").iterdir()) == []
    job.gone()


def test_no_rank_starts_without_a_node_that_never_joins(gangs: Make) -> None:
    job = gangs(3, join=2.0)
    replies = job.start(FOREVER, FOREVER, FOREVER, only=(0, 1))
    for number in (0, 1):
        missing = replies[number].unreachable
        assert missing is not None
        assert (missing.to, missing.by) == ({2: "Connection refused"}, (2,))
    assert_no_rank_has_started(job, 0, 1)
    for first in map(first_of, job.states(0, 1)):
        assert (first.cause, first.peer) == (Cause.UNREACHABLE, 2)


def test_port_that_is_taken_is_named_and_no_rank_starts(gangs: Make) -> None:
    job = gangs(2, join=2.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", job.gang.peers[1].port))
        taken.listen()
        replies = job.start(FOREVER, FOREVER)
    found = replies[1].unreachable
    assert found is not None
    assert "Address already in use" in found.error
    assert replies[0].unreachable is not None
    assert_no_rank_has_started(job, 0, 1)


def test_node_that_does_not_get_ready_is_named(gangs: Make, tmp_path: Path) -> None:
    """It is connected, and its nvidia-smi hangs, as with a driver that has failed."""
    job, hanging = gangs(2, join=1.0, preflight=True), 1
    program(tmp_path / "nvidia-smi", "exec sleep 600")
    job[hanging].variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    replies = job.start(FOREVER, FOREVER)
    expected = f"node {hanging} was not ready in time (does nvidia-smi answer there?)"
    first = first_of(job.verdict())
    assert (first.cause, first.detail) == (Cause.PREFLIGHT, expected)
    assert (found := replies[0].unreachable) is not None
    assert found.problems == (expected,)
    assert_no_rank_has_started(job, 0, 1)
