"""The status of a job, from its state on each node."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobstates import SIGTERM, agreed, job, killed, rank

from cloudddp.agent.protocol.jobs import Cause, Exited, Failure, JobState
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.agent.protocol.sentences import signal_name
from cloudddp.job import failure_text, outcome

SAVED = TrainingStatus(reported=1.0, state=TrainingState.PREEMPTED, step=7)
SILENT = Failure(1, Cause.SILENT, peer=0)
STOPPED = killed(0, SIGTERM, asked=True)
ENDED = {"cancelled": 10.0, "exit_code": 130}
RUNS, DONE, FAILED = job("running"), job("succeeded", rank(0, 0)), job("failed", rank(0, 7), exit_code=7)
FOUR, CANCELLED = job("failed", rank(1, 4, 10.0), exit_code=4), job("cancelled", STOPPED, **ENDED)
LOST, KILLED = job("lost", node=0, exit_code=1), job("lost", rank(0), node=0, exit_code=1)
OF_AGENT = job("failed", exit_code=1, node=0, verdict=agreed("failed", Failure(0, Cause.AGENT)))
OF_RANK = agreed("failed", Failure(1, Cause.RANK, 1, 7), 7)
UNKNOWN, NO_ANSWER = agreed("failed", None, 143), agreed("failed", SILENT)


def case(name: str, expected: str, *states: JobState) -> Any:
    """A row. `expected`: status and exit code."""
    return pytest.param(states, expected, id=name)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        case("one node runs", "running None", RUNS),
        case("a rank failed, another node runs", "running None", FAILED, RUNS),
        case("all succeeded", "succeeded 0", DONE, job("succeeded", rank(1, 0))),
        case("success, but a rank failed", "failed 3", DONE, job("succeeded", rank(1, 3), exit_code=0)),
        case("success, but no rank", "failed None", DONE, job("succeeded", expected=4, exit_code=0)),
        case("success, but a rank runs", "failed None", job("succeeded", rank(0, 0), rank(1), exit_code=0)),
        case("one rank failed", "failed 7", FAILED),
        case("the first failure counts", "failed 4", job("failed", rank(0, 3, 20.0), exit_code=3), FOUR),
        case("ranks that were stopped are not failures", "failed 4", job("failed", STOPPED), FOUR),
        case("SIGTERM from outside is a failure", "failed 143", job("failed", killed(0, SIGTERM))),
        case("the launcher failed", "failed 1", job("failed", exit_code=1)),
        case("a record is unreadable", "lost 1", job("lost", exit_code=1), job("failed")),
        case("an agent was killed after a rank", "failed 7", KILLED, job("lost", rank(1, 7), exit_code=1)),
        case("an agent was killed", "failed 1", KILLED),
        case("an agent was killed, another node runs", "running None", LOST, RUNS),
        case("an agent was killed in a cancelled job", "lost 1", LOST, job("cancelled", **ENDED)),
        case("agreed before that", "failed 7", OF_AGENT, job("failed", rank(1, 7), verdict=OF_RANK)),
        case("cancelled", "cancelled 130", CANCELLED),
        case(
            "before it was cancelled",
            "failed 9",
            CANCELLED,
            job("cancelled", rank(1, 9, 9.0), cancelled=10.5, exit_code=130),
        ),
        case("after that", "cancelled 130", job("cancelled", rank(0, 9, asked=True), **ENDED)),
        case(
            "agreed, and one still runs",
            "failed 1",
            job("failed", rank(0, 1, 5.0), verdict=NO_ANSWER),
            job("running", rank(1)),
        ),
        case(
            "a rank contradicts",
            "failed 4",
            job("succeeded", rank(0, 0), verdict=agreed("succeeded")),
            job("failed", rank(1, 4)),
        ),
        case("saved", "preempted 143", job("failed", rank(0, 143), training=SAVED, verdict=UNKNOWN)),
        case(
            "saved, but a node was lost",
            "failed 1",
            job("failed", rank(0, 143), training=SAVED, verdict=NO_ANSWER),
        ),
        case("exit code 143 without a snapshot", "failed 143", job("failed", rank(0, 143))),
    ],
)
def test_outcome(states: tuple[JobState, ...], expected: str) -> None:
    found = outcome.outcome(dict(enumerate(states)))
    assert f"{found.status} {found.exit_code}" == expected


def after(exited: Exited) -> Failure:
    return Failure(1, Cause.RANK, 2, 1, exited=exited)


RANK, LAUNCHER = "rank 2 on node 1", "the launcher (torchrun)"
ZERO, MEMORY = "rank 0 on node 0", "was killed by the kernel's OOM killer: node 1 has run out of memory"
CODE = f"{RANK} exited with code 1"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(1, Cause.RANK, 2, 7), f"{RANK} exited with code 7"),
        (Failure(1, Cause.RANK, 2, 137, 9), f"{RANK} was killed by SIGKILL"),
        (Failure(1, Cause.RANK, 2, 1, detail="ValueError: x\n\x1b[2J"), f"{CODE}: ValueError: x"),
        (after(Exited(0, 0, 3.04)), f"{CODE}; {ZERO} had exited with code 0 3.0 s before"),
        (
            after(Exited(0, 0, 120.0, likely=True)),
            f"{ZERO} exited with code 0 while other ranks were still running, the likely cause: "
            f"2 min later {CODE}",
        ),
        (
            after(Exited(0, 0, 0.2, 2)),
            f"{CODE}; {ZERO} and 2 other ranks had exited with code 0 0.2 s before",
        ),
        (
            after(Exited(0, 0, 59.9, 1)),
            f"{CODE}; {ZERO} and 1 other rank had exited with code 0 59.9 s before",
        ),
        (after(Exited(0, 0, 60.0)), f"{CODE}; {ZERO} had exited with code 0 1 min before"),
        (Failure(1, Cause.MEMORY, 2, 137, 9), f"{RANK} {MEMORY}"),
        (Failure(1, Cause.MEMORY, None, 137, 9), f"{LAUNCHER} on node 1 {MEMORY}"),
        (Failure(0, Cause.DISK, 0, 1), f"{ZERO} failed with code 1: no space is left on a disk of node 0"),
        (
            Failure(0, Cause.LAUNCHER, exit_code=137, signal=9),
            f"node 0: {LAUNCHER} was killed by SIGKILL before its ranks had finished",
        ),
        (
            Failure(0, Cause.LAUNCHER, exit_code=2),
            f"node 0: {LAUNCHER} exited with code 2 before its ranks had finished",
        ),
        (
            Failure(0, Cause.START, detail="no such file"),
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


def test_ranks_that_have_exited_in_words() -> None:
    first, second = (outcome.ExitedRank(rank, rank - 1, 86_400.0 + rank) for rank in (2, 1))
    assert failure_text.exited_text([]) == ""
    assert failure_text.exited_text([first]) == "rank 2 exited with 0 at 00:00:02 UTC"
    both = "ranks 1 and 2 exited with 0, rank 2 at 00:00:02 UTC as the first"
    assert failure_text.exited_text([first, second]) == both


# Its detail names nodes.
@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.PREFLIGHT}, key=lambda one: one.value))
def test_every_cause_names_its_node_in_words(cause: Cause) -> None:
    assert "node 5" in failure_text.sentence(Failure(5, cause, 11, 1))
    assert len(failure_text.sentence(Failure(0, Cause.RANK, 0, 1, detail="x" * 10_000))) < 400


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "SIGHUP"), (9, "SIGKILL"), (10, "SIGUSR1"), (15, "SIGTERM"), (31, "SIGSYS"), (40, "signal 40")],
)
def test_signal_names_are_those_of_linux(number: int, name: str) -> None:
    assert signal_name(number) == name


AT = 50600.0  # 14:03:20
AGENT = Failure(1, Cause.AGENT)
BOOTED, FIRST = (
    f"node {n} was rebooted while the job ran (it started again at 14:03:20 UTC)" for n in (1, 0)
)
REBOOTED = job("lost", node=1, rebooted=AT)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((job("failed", verdict=NO_ANSWER), REBOOTED), f"{BOOTED}; its ranks ended with it"),
        (
            (job("failed", verdict=agreed("failed", AGENT)), job("failed", node=1, rebooted=AT)),
            f"{BOOTED}; its ranks ended with it",
        ),
        ((job("lost", node=0, rebooted=AT), REBOOTED), f"{FIRST}; {BOOTED}; its ranks ended with it"),
        (
            (job("failed", verdict=agreed("failed", Failure(0, Cause.RANK, 0, 7), 7)), REBOOTED),
            f"rank 0 on node 0 exited with code 7; {BOOTED}",
        ),
        (
            (job("lost", node=0), job("lost", node=1)),
            "node 0: the agent of cloudddp has ended there, without a report",
        ),
        ((job("lost", rank(0, 7), node=0), job("lost", node=1)), "rank 0 on node 0 exited with code 7"),
        (
            (job("cancelled", setup=True), job("lost", node=1, setup=True, rebooted=AT)),
            "node 1 was rebooted during its setup (it started again at 14:03:20 UTC)",
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


@pytest.mark.parametrize(
    ("ends", "expected"), [((), None), ((None,), None), ((0.5,), 0.5), ((9.0, None, 4.0), 9.0)]
)
def test_seconds_are_those_of_the_node_on_which_the_job_ran_longest(
    ends: tuple[float | None, ...], expected: float | None
) -> None:
    assert (
        outcome.seconds(job("failed", started=100.0, ended=end and 100.0 + end) for end in ends) == expected
    )
