"""Restarts in place, by the agents alone: the whole gang or nothing, and not of what fails again."""

from __future__ import annotations

import sys

import pytest
from support.agentnode import alive, until
from support.gangs import Make, kill

from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

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
