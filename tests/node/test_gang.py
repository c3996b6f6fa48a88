"""The agents of several nodes that run one job: real processes, signals and connections. No rank starts
before all are connected; whatever ends, all ranks end with it, and every node keeps the same verdict."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from dataclasses import replace
from pathlib import Path

from support.agentnode import FOREVER, alive, first_of, until
from support.gangs import Gangs, Make, freeze, kill, thaw
from support.programs import program

from cloudddp.agent.protocol.jobs import MAX_LINES, Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase

TALKING = "for number in range(60): print('line', number, flush=True)\n"
LAST_LINES = tuple(f"line {number}" for number in range(60 - MAX_LINES, 60))


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


def assert_no_rank_has_started(job: Gangs, *nodes: int) -> None:
    for number in nodes:
        assert list((job[number].folder() / "ranks").iterdir()) == []
    job.gone()


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
