"""A supervisor that ends by an error of its own, as on a full disk: the verdict names the error, on every
node."""

from __future__ import annotations

import os
import resource
import signal
import sys

import pytest
from support.agentnode import FOREVER, Node, until
from support.gangs import Make, Processes

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")


def no_files(pid: int) -> None:
    """Let a process write no more to any file: as on a full disk, but for this process alone."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))


def test_error_is_in_the_verdict(node: Node) -> None:
    node.start(FOREVER, retries=1)
    found = Processes(node)
    no_files(found.supervisor)
    os.kill(found.ranks[0], signal.SIGKILL)
    until(lambda: node.state().phase.ended)
    verdict = node.state().verdict
    assert verdict is not None
    assert verdict.first is not None
    assert (verdict.phase, verdict.first.cause) == (JobPhase.FAILED, Cause.AGENT)
    assert verdict.first.detail == "OSError: [Errno 27] File too large"


@pytest.mark.parametrize("crashed", range(2))
def test_other_nodes_know_the_error(gangs: Make, crashed: int) -> None:
    """The job is started again, which each supervisor records."""
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
