"""A job whose node was rebooted: what the agent reports of it after the next start of the machine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.jobs import phases
from agent.node import kernel, store
from agent.steps import jobs
from cloudddp.agent.protocol.jobs import Cause, Failure, StateFile, Verdict
from cloudddp.agent.protocol.phases import JobPhase

JOB = "20260101-000000-abcd"
NODE, BOOTED = 1, 100_000.0
BEFORE = "another-boot/7"


def first(cause: Cause, node: int = NODE, **fields: Any) -> Failure:
    return Failure(node, cause, **fields)


KILLED = first(Cause.RANK, rank=1, exit_code=143, signal=15)


@pytest.mark.parametrize(
    ("why", "phase", "ended", "first", "expected"),
    [
        ("its end was not recorded", JobPhase.LOST, None, None, True),
        ("the others lost it", JobPhase.FAILED, -60, first(Cause.SILENT, peer=0), True),
        ("they noticed after it had started again", JobPhase.FAILED, 20, first(Cause.SILENT, peer=0), True),
        ("its agent had ended long before", JobPhase.FAILED, -9000, first(Cause.AGENT), False),
        ("a rank failed", JobPhase.FAILED, -60, first(Cause.RANK, rank=1, exit_code=7), False),
        ("a rank was killed long before", JobPhase.FAILED, -600, KILLED, False),
        ("it was cancelled", JobPhase.CANCELLED, -60, None, False),
    ],
)
def test_job_that_ended_with_its_machine(
    why: str, phase: JobPhase, ended: float | None, first: Failure | None, expected: bool
) -> None:
    at = None if ended is None else BOOTED + ended
    assert phases.ended_with_machine(phase, NODE, at, first, BOOTED) is expected, why


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "ROOT", tmp_path)
    found = tmp_path / "jobs" / JOB
    found.mkdir(parents=True)
    return found


def running(folder: Path, boot: str) -> StateFile:
    """The record of a job whose supervisor is a process with the pid and the time of birth of this one."""
    state = StateFile(
        JOB, NODE, JobPhase.RUNNING, started=1.0, expected=0, pid=1, born=kernel.born(1), boot=boot
    )
    store.write(folder / phases.JOB_FILE, phases.JobFile(NODE))
    store.write(folder / phases.STATE_FILE, state)
    return state


@pytest.mark.parametrize("boot", ["", kernel.boot()])
def test_job_runs_while_its_supervisor_does(folder: Path, boot: str) -> None:
    running(folder, boot)
    found = jobs.state_of(folder)
    assert (found.phase, found.rebooted) == (JobPhase.RUNNING, None)


def test_process_of_a_later_boot_is_not_the_supervisor(folder: Path) -> None:
    """After a reboot, pids and the ticks since the start of the machine can be the same again."""
    running(folder, BEFORE)
    found = jobs.state_of(folder)
    assert found.phase is JobPhase.LOST
    assert found.rebooted == pytest.approx(kernel.booted_at(), abs=1)


def test_time_of_the_first_start_is_kept_once_it_was_reported(folder: Path) -> None:
    state = running(folder, BEFORE)
    first = jobs.state_of(folder).rebooted
    concluded = Verdict(JobPhase.FAILED, 1, 0, Failure(NODE, Cause.SILENT, peer=0))
    store.write(folder / phases.VERDICT_FILE, concluded)
    store.write(folder / phases.STATE_FILE, replace(state, state=JobPhase.FAILED, ended=2.0, boot="later/7"))
    found = jobs.state_of(folder)
    assert (found.phase, found.rebooted) == (JobPhase.FAILED, first)


def test_changed_clock_is_no_reboot(folder: Path) -> None:
    """The supervisor was killed; its record is years old by the clock that was set since."""
    state = replace(running(folder, kernel.boot()), started=time.time() + 1e9, pid=1 << 30)
    store.write(folder / phases.STATE_FILE, state)
    found = jobs.state_of(folder)
    assert (found.phase, found.rebooted) == (JobPhase.LOST, None)


@pytest.mark.parametrize(("boot", "phase"), [(kernel.boot(), JobPhase.SETUP), (BEFORE, JobPhase.LOST)])
def test_setup_that_ended_with_its_machine(folder: Path, boot: str, phase: JobPhase) -> None:
    setup = StateFile(JOB, NODE, JobPhase.SETUP, 1.0, pid=1, born=kernel.born(1), boot=boot)
    store.write(folder / phases.STATE_FILE, setup)
    found = jobs.state_of(folder)
    assert (found.setup, found.phase, found.rebooted is not None) == (True, phase, phase is JobPhase.LOST)
