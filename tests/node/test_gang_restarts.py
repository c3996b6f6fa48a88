"""Restarts in place, by the agents alone: the whole gang or nothing, and not of what fails again."""

from __future__ import annotations

import sys

import pytest
from support.agentnode import alive, until
from support.gangs import Make, kill

from cloudddp.agent.protocol.jobs import Verdict
from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

STATUS = """
import json, os
def step(number):
    path = os.environ['CLOUDDDP_STATUS_FILE']
    with open(path + '.new', 'w') as file:
        json.dump({'step': number}, file)
    os.replace(path + '.new', path)
"""
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
        until(lambda node=node: (node.project / "attempts").exists())  # type: ignore[misc]
    kill(first[1])
    verdict = job.verdict()
    assert (verdict.phase, verdict.restarts) == (JobPhase.SUCCEEDED, 1)
    for node in job.nodes:
        attempts = [line.split() for line in (node.project / "attempts").read_text().splitlines()]
        assert [one[0] for one in attempts] == ["0", "1"]
        assert int(attempts[0][1]) == first[node.number]
    assert not any(map(alive, first))


def test_no_rank_starts_again_before_those_of_all_nodes_have_ended(gangs: Make) -> None:
    """The rank of node 0 ends slowly, because it saves; that of node 1 fails once the other one is under
    way."""
    slow = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.4)
    print('saved', time.monotonic_ns(), flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
if os.environ['CLOUDDDP_ATTEMPT'] == '0':
    open(os.environ['READY'], 'w').close()
    time.sleep(600)
print('again', time.monotonic_ns(), flush=True)
"""
    fails = """
import os, sys, time
while not os.path.exists(os.environ['FAIL']): time.sleep(0.02)
if os.environ['CLOUDDDP_ATTEMPT'] == '0': sys.exit(3)
print('again', time.monotonic_ns(), flush=True)
"""
    job = gangs(2)
    ready, fail = job[0].home / "ready", job[0].home / "fail"
    job.start(slow, fails, retries=1, env={"READY": str(ready), "FAIL": str(fail)})
    until(lambda: ready.exists() and job.pid(0, 0))  # its wrapper has recorded it: it passes SIGTERM on
    fail.touch()
    verdict = job.verdict()
    assert (verdict.phase, verdict.restarts) == (JobPhase.SUCCEEDED, 1)
    logs = (job.log(0, 0) + b"\n" + job.log(1, 1)).decode().splitlines()
    times = {
        name: [int(line.split()[1]) for line in logs if line.startswith(name)] for name in ("saved", "again")
    }
    assert len(times["saved"]) == 1
    assert len(times["again"]) == 2
    assert times["saved"][0] < min(times["again"])


@pytest.mark.parametrize(
    ("code", "restarts", "refusal"),
    [
        pytest.param("this is no Python", 0, "the script itself is wrong", id="SyntaxError"),
        pytest.param(
            STATUS + "step(120)\nraise SystemExit(3)",
            2,
            "the same failure has occurred 3 times at step 120",
            id="the same step",
        ),
    ],
)
def test_failure_that_would_come_again_is_not_repeated(
    gangs: Make, code: str, restarts: int, refusal: str
) -> None:
    job = gangs(2)
    job.start(code, "import time; time.sleep(600)", retries=4)
    verdict: Verdict = job.verdict()
    assert (verdict.phase, verdict.restarts, verdict.refusal) == (JobPhase.FAILED, restarts, refusal)
    assert verdict.first is not None
    assert verdict.first.rank == 0


def test_lines_of_an_earlier_attempt_say_nothing_of_the_last_one(gangs: Make) -> None:
    """The rank loses a connection in the first attempt, and fails by itself in the second one, without a
    word."""
    code = """
import os, sys
if os.environ['CLOUDDDP_ATTEMPT'] == '0': sys.exit('RuntimeError: Connection closed by peer [172.31.0.5]:29400')
sys.exit(3)
"""  # noqa: E501
    job = gangs(2)
    job.start(code, "import time; time.sleep(600)", retries=1)
    verdict = job.verdict()
    assert verdict.first is not None
    assert (verdict.restarts, verdict.first.exit_code, verdict.last_lines) == (1, 3, ())
    assert b"Connection closed by peer" in job.log(0, 0)
