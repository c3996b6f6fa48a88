"""The status of a job, from its state on each node."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobstates import SIGKILL, SIGTERM, agreed, job, killed, rank

from cloudddp.agent.protocol.jobs import Cause, Exited, Failure, JobState
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.agent.protocol.sentences import signal_name
from cloudddp.job import failure_text, outcome

SAVED = TrainingStatus(reported=1.0, state=TrainingState.PREEMPTED, step=7)
SILENT = Failure(1, Cause.SILENT, peer=0)


def case(name: str, expected: str, *states: JobState) -> Any:
    """A row. `expected`: status and exit code."""
    return pytest.param(states, expected, id=name)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        case("one node runs", "running None", job("running")),
        case(
            "a rank failed, another node runs",
            "running None",
            job("failed", rank(0, 7), exit_code=7),
            job("running"),
        ),
        case("one node starts", "starting None", job("starting"), job("succeeded")),
        case("setup", "setup None", job("setup")),
        case("all succeeded", "succeeded 0", job("succeeded", rank(0, 0)), job("succeeded", rank(1, 0))),
        case(
            "success is reported, but a rank failed",
            "failed 3",
            job("succeeded", rank(0, 0)),
            job("succeeded", rank(1, 3), exit_code=0),
        ),
        case(
            "success is reported, but a rank failed before a restart",
            "failed 3",
            job("succeeded", rank(0, 3), max_restarts=1, exit_code=0),
        ),
        case(
            "success is reported, but no rank",
            "failed None",
            job("succeeded", rank(0, 0)),
            job("succeeded", expected=4, exit_code=0),
        ),
        case("success of no ranks is reported", "failed None", job("succeeded", exit_code=0)),
        case(
            "success is reported, but a rank runs",
            "failed None",
            job("succeeded", rank(0, 0), rank(1), exit_code=0),
        ),
        case("one rank failed", "failed 7", job("failed", rank(0, 7), exit_code=7)),
        case("a rank is reported twice", "failed 7", job("failed", rank(0, 7), rank(0, 7))),
        case(
            "the first failure counts",
            "failed 4",
            job("failed", rank(0, 3, 20.0), exit_code=3),
            job("failed", rank(1, 4, 10.0), exit_code=4),
        ),
        case(
            "ranks that were stopped are not failures",
            "failed 4",
            job("failed", killed(0, SIGTERM, asked=True)),
            job("failed", rank(1, 4, 10.0)),
        ),
        case(
            "only stopped ranks are left",
            "failed 143",
            job("failed", killed(0, SIGTERM, asked=True), exit_code=143),
        ),
        case("SIGTERM from outside is a failure", "failed 143", job("failed", killed(0, SIGTERM))),
        case("the launcher failed", "failed 1", job("failed", exit_code=1)),
        case("a record is unreadable", "lost 1", job("lost", exit_code=1), job("failed")),
        case(
            "an agent was killed after a rank had failed",
            "failed 7",
            job("lost", rank(0), node=0, exit_code=1),
            job("lost", rank(1, 7), node=1, exit_code=1),
        ),
        case("an agent was killed", "failed 1", job("lost", rank(0), node=0, exit_code=1)),
        case(
            "an agent was killed with its rank",
            "failed 1",
            job("lost", killed(0, SIGKILL), node=0, exit_code=1),
        ),
        case(
            "an agent was killed, another node runs",
            "running None",
            job("lost", node=0, exit_code=1),
            job("running"),
        ),
        case(
            "an agent was killed while its job was cancelled",
            "lost 1",
            job("lost", node=0, exit_code=1),
            job("cancelled", cancelled=10.0, exit_code=130),
        ),
        case(
            "the nodes agree on what failed before an agent was killed",
            "failed 7",
            job("failed", exit_code=1, node=0, verdict=agreed("failed", Failure(0, Cause.AGENT))),
            job("failed", rank(1, 7), verdict=agreed("failed", Failure(1, Cause.RANK, 1, 7), 7)),
        ),
        case(
            "cancelled",
            "cancelled 130",
            job("cancelled", killed(0, SIGTERM, asked=True), cancelled=10.0, exit_code=130),
        ),
        case(
            "failed before it was cancelled",
            "failed 9",
            job("cancelled", killed(0, SIGTERM, asked=True), cancelled=10.0, exit_code=130),
            job("cancelled", rank(1, 9, 9.0), cancelled=10.5, exit_code=130),
        ),
        case(
            "failed after it was cancelled",
            "cancelled 130",
            job("cancelled", rank(0, 9, asked=True), cancelled=10.0, exit_code=130),
        ),
        case(
            "the nodes have agreed on a failure, and one still runs",
            "failed 1",
            job("failed", rank(0, 1, 5.0), verdict=agreed("failed", SILENT)),
            job("running", rank(1)),
        ),
        case(
            "the nodes have agreed on success",
            "succeeded 0",
            job("succeeded", rank(0, 0), verdict=agreed("succeeded")),
        ),
        case(
            "the nodes have agreed on success, which a rank contradicts",
            "failed 4",
            job("succeeded", rank(0, 0), verdict=agreed("succeeded")),
            job("failed", rank(1, 4)),
        ),
        case(
            "the nodes have agreed on a cancel, although a clock says that a rank failed before it",
            "cancelled 130",
            job("cancelled", rank(0, 9, 5.0), cancelled=10.0, verdict=agreed("cancelled")),
        ),
        case(
            "the nodes have agreed that no rank failed, and a snapshot was saved",
            "preempted 143",
            job("failed", rank(0, 143), training=SAVED, verdict=agreed("failed", None, 143)),
        ),
        case(
            "a snapshot was saved, but a node was lost",
            "failed 1",
            job("failed", rank(0, 143), training=SAVED, verdict=agreed("failed", SILENT)),
        ),
        case("preempted", "preempted 143", job("failed", rank(0, 143), training=SAVED)),
        case("exit code 143 without a snapshot", "failed 143", job("failed", rank(0, 143))),
        case("a snapshot, but another failure", "failed 7", job("failed", rank(0, 7), training=SAVED)),
    ],
)
def test_outcome(states: tuple[JobState, ...], expected: str) -> None:
    found = outcome.outcome(dict(enumerate(states)))
    assert f"{found.status} {found.exit_code}" == expected


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(1, Cause.RANK, 2, 7), "rank 2 on node 1 exited with code 7"),
        (Failure(1, Cause.RANK, 2, 137, 9), "rank 2 on node 1 was killed by SIGKILL"),
        (
            Failure(1, Cause.RANK, 2, 1, detail="ValueError: x\n\x1b[2J"),
            "rank 2 on node 1 exited with code 1: ValueError: x",
        ),
        (
            Failure(1, Cause.RANK, 2, 1, exited=Exited(0, 0, 3.04)),
            "rank 2 on node 1 exited with code 1; rank 0 on node 0 had exited with code 0 3.0 s before",
        ),
        (
            Failure(1, Cause.RANK, 2, 1, exited=Exited(0, 0, 120.0, likely=True)),
            "rank 0 on node 0 exited with code 0 while other ranks were still running, the likely cause: "
            "2 min later rank 2 on node 1 exited with code 1",
        ),
        (
            Failure(1, Cause.RANK, 2, 1, exited=Exited(0, 0, 0.2, 2)),
            "rank 2 on node 1 exited with code 1; rank 0 on node 0 and 2 other ranks had exited with code 0 "
            "0.2 s before",
        ),
        (
            Failure(1, Cause.MEMORY, 2, 137, 9),
            "rank 2 on node 1 was killed by the kernel's OOM killer: node 1 has run out of memory",
        ),
        (
            Failure(1, Cause.MEMORY, None, 137, 9),
            "the launcher (torchrun) on node 1 was killed by the kernel's OOM killer: node 1 has run out of "
            "memory",
        ),
        (
            Failure(0, Cause.DISK, 0, 1),
            "rank 0 on node 0 failed with code 1: no space is left on a disk of node 0",
        ),
        (
            Failure(0, Cause.LAUNCHER, exit_code=137, signal=9),
            "node 0: the launcher (torchrun) was killed by SIGKILL before its ranks had finished",
        ),
        (
            Failure(0, Cause.LAUNCHER, exit_code=2),
            "node 0: the launcher (torchrun) exited with code 2 before its ranks had finished",
        ),
        (
            Failure(0, Cause.START, exit_code=127, detail="no such file"),
            "node 0: the ranks could not be started: no such file",
        ),
        (Failure(3, Cause.AGENT), "node 3: the agent of cloudddp has ended there, without a report"),
        (Failure(3, Cause.SILENT, peer=0), "node 3 was lost: it sent nothing to node 0"),
        (
            Failure(0, Cause.UNREACHABLE, detail="Connection refused", peer=2),
            "node 0 was not connected to node 2, so no rank was started: Connection refused",
        ),
        (Failure(0, Cause.UNREACHABLE), "node 0 was not connected to another node, so no rank was started"),
    ],
    ids=lambda value: value.cause.value if isinstance(value, Failure) else "",
)
def test_first_failure_in_words(failure: Failure, words: str) -> None:
    found = failure_text.sentence(failure)
    assert found.startswith(words)
    assert found.isprintable()


# Its detail names nodes.
@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.PREFLIGHT}, key=lambda one: one.value))
def test_every_cause_names_its_node_in_words(cause: Cause) -> None:
    assert "node 5" in failure_text.sentence(Failure(5, cause, 11, 1))


def test_detail_of_a_failure_is_cut() -> None:
    assert len(failure_text.sentence(Failure(0, Cause.RANK, 0, 1, detail="x" * 10_000))) < 400


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "SIGHUP"), (9, "SIGKILL"), (10, "SIGUSR1"), (15, "SIGTERM"), (31, "SIGSYS"), (40, "signal 40")],
)
def test_signal_names_are_those_of_linux(number: int, name: str) -> None:
    assert signal_name(number) == name


AGAIN = "(it started again at 14:03:20 UTC)"
AT = 50600.0  # 14:03:20
AGENT = Failure(1, Cause.AGENT)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (
            (job("failed", verdict=agreed("failed", SILENT)), job("lost", node=1, rebooted=AT)),
            f"node 1 was rebooted while the job ran {AGAIN}; its ranks ended with it",
        ),
        (
            (job("failed", verdict=agreed("failed", AGENT)), job("failed", node=1, rebooted=AT)),
            f"node 1 was rebooted while the job ran {AGAIN}; its ranks ended with it",
        ),
        (
            (job("lost", node=0, rebooted=AT), job("lost", node=1, rebooted=AT)),
            f"node 0 was rebooted while the job ran {AGAIN}; node 1 was rebooted while the job ran {AGAIN}; "
            "its ranks ended with it",
        ),
        (
            (
                job("failed", verdict=agreed("failed", Failure(0, Cause.RANK, 0, 7), 7)),
                job("lost", node=1, rebooted=AT),
            ),
            f"rank 0 on node 0 exited with code 7; node 1 was rebooted while the job ran {AGAIN}",
        ),
        (
            (job("lost", node=0), job("lost", node=1)),
            "node 0: the agent of cloudddp has ended there, without a report",
        ),
        (
            (job("lost", rank(0, 7), node=0), job("lost", node=1)),
            "rank 0 on node 0 exited with code 7",
        ),
        (
            (job("cancelled", setup=True), job("lost", node=1, setup=True, rebooted=AT)),
            f"node 1 was rebooted during its setup {AGAIN}",
        ),
    ],
)
def test_reboot_is_named_as_the_cause(states: tuple[JobState, ...], words: str) -> None:
    assert failure_text.cause(dict(enumerate(states))) == words


def test_ranks_that_have_exited_with_0_are_the_first_ones_first() -> None:
    states = {0: job("failed", rank(0, 0, 9.0), rank(1, 7, 1.0), rank(2)), 1: job("failed", rank(3, 0, 5.0))}
    assert [(one.rank, one.node, one.ended) for one in outcome.exited_ranks(states)] == [
        (3, 1, 5.0),
        (0, 0, 9.0),
    ]


@pytest.mark.parametrize(("first", "node"), [(None, None), (SILENT, None), (Failure(1, Cause.NOTICE), 1)])
def test_node_that_is_about_to_end_is_the_one_with_a_notice(first: Failure | None, node: int | None) -> None:
    assert outcome.leaving({0: job("failed", verdict=agreed("failed", first))}) == node


def test_ranks_expected_are_those_that_a_node_was_to_start() -> None:
    states = [job("failed", rank(0), expected=4), job("failed", rank(4), rank(5), expected=None)]
    assert outcome.ranks_expected(states) == 6


@pytest.mark.parametrize(
    ("ends", "expected"), [((), None), ((None,), None), ((0.5,), 0.5), ((9.0, None, 4.0), 9.0)]
)
def test_seconds_are_those_of_the_node_on_which_the_job_ran_longest(
    ends: tuple[float | None, ...], expected: float | None
) -> None:
    assert (
        outcome.seconds(job("failed", started=100.0, ended=end and 100.0 + end) for end in ends) == expected
    )
