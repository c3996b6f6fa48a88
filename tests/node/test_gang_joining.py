"""The beginning of a job on several nodes: no rank starts before all agents are connected to each other."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from support.agentnode import FOREVER
from support.gangs import Gangs, Make

from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")


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
    for state in job.states(0, 1):
        assert state.verdict is not None
        assert state.verdict.first is not None
        assert (state.phase, state.verdict.first.cause, state.verdict.first.peer) == (
            JobPhase.FAILED,
            Cause.UNREACHABLE,
            2,
        )


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
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    job[hanging].variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    replies = job.start(FOREVER, FOREVER)
    expected = f"node {hanging} was not ready in time (does nvidia-smi answer there?)"
    assert (first := job.verdict().first) is not None
    assert (first.cause, first.detail) == (Cause.PREFLIGHT, expected)
    assert (found := replies[0].unreachable) is not None
    assert found.problems == (expected,)
    assert_no_rank_has_started(job, 0, 1)
