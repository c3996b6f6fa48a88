"""The guard of a job: it notices a supervisor that does nothing, although it lives."""

from __future__ import annotations

import sys
import time

import pytest
from support.agentnode import FOREVER, WAITING, Node, alive, until
from support.gangs import Make, Processes, freeze, kill, thaw

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")
SILENCE = 1.5  # seconds
IGNORES = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + FOREVER


def test_ranks_of_a_stopped_supervisor_end(gangs: Make) -> None:
    job = gangs(2, silence=SILENCE)
    job.start(FOREVER, IGNORES)
    stopped = job.pids(1)
    freeze(stopped.supervisor)
    first, second = job.states()
    assert first.verdict is not None
    assert first.verdict.first is not None
    assert (first.verdict.first.cause, first.verdict.first.node) == (Cause.SILENT, 1)
    assert second.verdict is not None
    assert second.verdict.first is not None
    assert (second.verdict.first.cause, second.verdict.first.node) == (Cause.AGENT, 1)
    assert second.verdict.first.detail.startswith("it did nothing for ")
    job.gone()


def test_node_that_was_frozen_as_a_whole_goes_on(gangs: Make) -> None:
    job = gangs(1, silence=SILENCE)
    job.start(WAITING)
    found = job.pids(0)
    everything = (*found.of_cloudddp, *found.ranks)
    freeze(*everything)
    time.sleep(SILENCE + 5)  # longer than the guard waits
    thaw(*everything)
    time.sleep(1)
    assert alive(found.supervisor)
    (job[0].project / "go").touch()
    assert job.states()[0].phase is JobPhase.SUCCEEDED


def test_ranks_end_where_the_guard_is_stopped_and_the_supervisor_was_killed(node: Node) -> None:
    node.start(IGNORES, grace=0.5)
    found = Processes(node)
    freeze(found.guard)
    try:
        kill(found.supervisor)
        until(lambda: not any(map(alive, found.ranks)))
    finally:
        thaw(found.guard)
    until(lambda: node.state().phase.ended)
