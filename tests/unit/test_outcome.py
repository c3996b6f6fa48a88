"""The status of a job, from its state on each node."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobstates import SIGKILL, SIGTERM, job, killed, rank

from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.training import TrainingState, TrainingStatus
from cloudddp.job import outcome
from cloudddp.job.outcome import JobStatus

SAVED = TrainingStatus(reported=1.0, state=TrainingState.PREEMPTED, step=7)


def case(name: str, *states: JobState, status: str, code: int | None) -> Any:
    return pytest.param(states, JobStatus(status), code, id=name)


@pytest.mark.parametrize(
    ("states", "status", "exit_code"),
    [
        case("one node runs", job("running"), status="running", code=None),
        case("a rank failed, another node runs", job("failed", rank(0, 7), exit_code=7), job("running"), status="running", code=None),
        case("one node starts", job("starting"), job("succeeded"), status="starting", code=None),
        case("setup", job("setup"), status="setup", code=None),
        case("all succeeded", job("succeeded", rank(0, 0)), job("succeeded", rank(1, 0)), status="succeeded", code=0),
        case(
            "success is reported, but a rank failed",
            job("succeeded", rank(0, 0)), job("succeeded", rank(1, 3), exit_code=0), status="failed", code=3,
        ),
        case(
            "success is reported, but a rank failed before a restart",
            job("succeeded", rank(0, 3), max_restarts=1, exit_code=0), status="failed", code=3,
        ),
        case(
            "success is reported, but no rank",
            job("succeeded", rank(0, 0)), job("succeeded", expected=4, exit_code=0), status="failed", code=None,
        ),
        case("success of no ranks is reported", job("succeeded", exit_code=0), status="failed", code=None),
        case(
            "success is reported, but a rank runs",
            job("succeeded", rank(0, 0), rank(1), exit_code=0), status="failed", code=None,
        ),
        case("one rank failed", job("failed", rank(0, 7), exit_code=7), status="failed", code=7),
        case(
            "the first failure counts",
            job("failed", rank(0, 3, 20.0), exit_code=3), job("failed", rank(1, 4, 10.0), exit_code=4),
            status="failed", code=4,
        ),
        case(
            "ranks that were stopped are not failures",
            job("failed", killed(0, SIGTERM, 5.0), stopping=True), job("failed", rank(1, 4, 10.0)),
            status="failed", code=4,
        ),
        case(
            "only stopped ranks are left",
            job("failed", killed(0, SIGTERM), stopping=True, exit_code=143), status="failed", code=None,
        ),
        case(
            "SIGTERM from outside is a failure",
            job("failed", killed(0, SIGTERM)), status="failed", code=143,
        ),
        case("the launcher failed", job("failed", exit_code=1), status="failed", code=1),
        case("a supervisor was lost", job("lost", exit_code=1), job("failed", rank(1, 7)), status="lost", code=1),
        case(
            "cancelled",
            job("cancelled", killed(0, SIGTERM, 11.0), cancelled=10.0, exit_code=130, stopping=True),
            status="cancelled", code=130,
        ),
        case(
            "failed before it was cancelled",
            job("cancelled", killed(0, SIGTERM, 11.0), cancelled=10.0, exit_code=130, stopping=True),
            job("cancelled", rank(1, 9, 9.0), cancelled=10.5, exit_code=130, stopping=True),
            status="failed", code=9,
        ),
        case(
            "failed after it was cancelled",
            job("cancelled", rank(0, 9, 11.0), cancelled=10.0, exit_code=130, stopping=True),
            status="cancelled", code=130,
        ),
        case("preempted", job("failed", rank(0, 143), training=SAVED), status="preempted", code=143),
        case("exit code 143 without a snapshot", job("failed", rank(0, 143)), status="failed", code=143),
        case("a snapshot, but another failure", job("failed", rank(0, 7), training=SAVED), status="failed", code=7),
    ],
)  # fmt: skip
def test_outcome(states: tuple[JobState, ...], status: JobStatus, exit_code: int | None) -> None:
    found = outcome.outcome(dict(enumerate(states)))
    assert (found.status, found.exit_code) == (status, exit_code)


@pytest.mark.parametrize(
    ("states", "failed"),
    [
        pytest.param([job("running", rank(0))], False, id="running"),
        pytest.param([job("succeeded", rank(0, 0))], False, id="succeeded"),
        pytest.param([job("running", rank(0)), job("failed", exit_code=1)], True, id="failed on one node"),
        pytest.param([job("lost")], True, id="supervisor lost"),
        pytest.param([job("cancelled")], True, id="cancelled"),
        pytest.param([job("running", rank(0, 7), rank(1))], True, id="one rank failed"),
        pytest.param([job("running", rank(0, 7), max_restarts=1)], False, id="torchrun restarts it"),
        pytest.param([job("failed", rank(0, 7)), job("running", stopping=True)], False, id="being stopped"),
    ],
)
def test_failure_that_requires_a_stop(states: list[JobState], failed: bool) -> None:
    assert outcome.has_failed(states) is failed


@pytest.mark.parametrize(
    ("number", "name"), [(1, "SIGHUP"), (9, "SIGKILL"), (10, "SIGUSR1"), (15, "SIGTERM"), (31, "SIGSYS"), (40, "signal 40")]
)  # fmt: skip
def test_signal_names_are_those_of_linux(number: int, name: str) -> None:
    assert outcome.signal_name(number) == name


def test_failure_in_words() -> None:
    found = outcome.outcome({0: job("failed", rank(3, 7, 1.0)), 1: job("failed", killed(4, SIGKILL, 2.0))})
    assert [str(failure) for failure in found.failures] == [
        "rank 3 on node 0 exited with code 7",
        "rank 4 on node 1 was killed by SIGKILL",
    ]
