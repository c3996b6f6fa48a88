"""How a job ended, from the events of following it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobstates import SIGTERM, agreed, followed, job, killed, lost, rank, update

from cloudddp.agent.protocol import SETUP_RANK
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.errors import NodeError
from cloudddp.job.follow.events import Event, JobUpdate, LogData, NodeFinished, NodeLost
from cloudddp.job.follow.state import TAIL_LINES
from cloudddp.job.follow.verdict import JobResult, verdict

NOW = 1000.0
FINISHED = [NodeFinished(0), NodeFinished(1)]
SAVED = TrainingStatus(reported=1.0, state=TrainingState.PREEMPTED, step=7)
RANK_1 = Failure(1, Cause.RANK, 1, 7)
RUNNING = [update(node, "running", rank(node)) for node in range(2)]
SUCCEEDED = [update(node, "succeeded", rank(node, 0)) for node in range(2)]
LOST = lost(1, NOW - 10.0)
NODE_1_LOST = "failed 1: node 1 was lost: not responding for 10 s (no route to host)"
OFFLINE = "unknown 1: lost connection to all nodes; the job may still be running"
BY_RANK_1, NO_REASON = (
    "failed 7: rank 1 on node 1 exited with code 7",
    "its ranks were ended, and no node knows why",
)
STOPPED, FAILED = update(0, "failed", killed(0, SIGTERM, asked=True)), update(0, "failed", rank(0, 7, 1.0))
ALL_DONE = update(0, "succeeded", rank(0, 0), verdict=agreed("succeeded"))


def result(events: Sequence[Event], *, nodes: int = 2) -> JobResult:
    return verdict(followed(events, nodes=nodes), "j", NOW)


def case(name: str, expected: str, *events: Event) -> Any:
    """A row. `expected`: status, exit code and cause."""
    return pytest.param(events, expected, id=name)


def ended(name: str, expected: str, *events: Event) -> Any:
    """A row in which the streams of all nodes have ended."""
    return case(name, expected, *events, *FINISHED)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ended("all succeeded", "succeeded 0", SUCCEEDED[0], SUCCEEDED[1]),
        ended("a rank failed", BY_RANK_1, STOPPED, update(1, "failed", rank(1, 7, 10.0))),
        ended("cancelled", "cancelled 130", update(0, "cancelled"), update(1, "cancelled")),
        ended(
            "preempted",
            "preempted 143: its ranks were asked to stop (SIGTERM)",
            update(0, "failed", rank(0, 143, 5.0), training=SAVED),
            update(1, "failed", rank(1, 143)),
        ),
        ended("no record is readable", f"failed 1: {NO_REASON}", update(0, "lost"), SUCCEEDED[1]),
        ended("still running, for a reader", "running 0", RUNNING[0], RUNNING[1]),
        # The nodes have agreed.
        ended(
            "the verdict names another cause than the clocks of the nodes",
            BY_RANK_1,
            update(0, "failed", rank(0, 1, 5.0), verdict=agreed("failed", RANK_1, 7)),
            update(1, "failed", rank(1, 7, 10.0), verdict=agreed("failed", RANK_1, 7)),
        ),
        case("lost to this computer alone", "succeeded 0", ALL_DONE, RUNNING[1], NodeFinished(0), LOST),
        case(
            "a node was lost, and a rank of another one had failed before",
            BY_RANK_1,
            update(0, "failed", rank(0, 1), verdict=agreed("failed", RANK_1, 7)),
            NodeFinished(0),
            lost(1, 1.0),
        ),
        ended(
            "no node knows why",
            f"failed 143: {NO_REASON}",
            update(0, "failed", rank(0, 143), verdict=agreed("failed", None, 143)),
        ),
        # Nodes are lost.
        case("a node was lost", NODE_1_LOST, RUNNING[0], LOST),
        case(
            "ranks failed of it", NODE_1_LOST, update(0, "failed", rank(0, 1, 995.0)), LOST, NodeFinished(0)
        ),
        case("offline", OFFLINE, RUNNING[0], lost(0, 990.0), LOST),
        case("offline, after a rank failed", OFFLINE, FAILED, lost(0, 990.0), LOST),
        case("one instance has ended, the other node is lost", OFFLINE, lost(0, 990.0, ended=True), LOST),
        case(
            "all instances have ended",
            "failed 1: none of its nodes is still running; node 0: no route to host",
            lost(0, 990.0, ended=True),
            lost(1, 990.0, ended=True),
        ),
        case(
            "a node sends invalid replies",
            "failed 1: node 1 sent junk",
            FAILED,
            NodeLost(1, "junk", 990.0, error=NodeError("node 1 sent junk")),
        ),
    ],
)
def test_verdict(events: Sequence[Event], expected: str) -> None:
    found = result(events)
    assert f"{found.status} {found.exit_code}" + (found.cause and f": {found.cause}") == expected


def test_last_lines_are_those_of_the_first_failing_rank() -> None:
    lines = [f"line {number}" for number in range(50)]
    logs = [LogData(0, 0, b"of another rank\n"), LogData(0, 1, "\n".join(lines).encode())]
    found = result([*logs, update(0, "failed", rank(0, 1, 9.0), rank(1, 7, 5.0)), *FINISHED])
    assert (found.last_lines, found.ranks) == (tuple(lines[-TAIL_LINES:]), 2)


def test_last_lines_of_a_setup_are_those_of_its_commands_and_those_of_the_verdict_are_shown() -> None:
    """A client that lacks the log of the node that failed still shows why."""
    found = result([LogData(0, SETUP_RANK, b"no such package\n"), update(0, "failed", setup=True), *FINISHED])
    assert found.last_lines == ("no such package",)
    end = agreed("failed", Failure(1, Cause.RANK, 1, 7), 7, "the last", "words")
    found = result([LogData(0, 0, b"hello\n"), update(0, "failed", rank(0, 143), verdict=end), *FINISHED])
    assert found.last_lines == ("the last", "words")


def test_nodes_that_have_not_ended_their_streams_are_unverified() -> None:
    first = Failure(1, Cause.SILENT, peer=0)
    found = result([update(0, "failed", verdict=agreed("failed", first)), RUNNING[1], NodeFinished(0)])
    assert (found.status, found.exit_code, found.unverified) == ("failed", 1, (1,))
    assert found.cause == "node 1 was lost: it sent nothing to node 0"


def scripts() -> dict[str, list[list[Event]]]:
    """What each of three nodes reports, in its own order, in jobs of several kinds."""
    return {
        "succeeded": [
            [
                LogData(n, n, b"a\nb"),
                *(update(n, phase, rank(n, code)) for phase, code in (("running", None), ("succeeded", 0))),
                NodeFinished(n),
            ]
            for n in range(3)
        ],
        "failed": [
            [LogData(0, 0, b"x\n"), STOPPED, NodeFinished(0)],
            [
                LogData(1, 1, b"boom"),
                *(update(1, phase, rank(1, 7, 10.0)) for phase in ("running", "failed")),
                NodeFinished(1),
            ],
            [update(2, "failed", rank(2, 1, 11.0)), NodeFinished(2)],
        ],
        "lost": [
            [update(0, "failed", rank(0, 1, 12.0)), NodeFinished(0)],
            [LogData(1, 1, b"half a li"), RUNNING[1], lost(1, 5.0)],
            [update(2, "failed", killed(2, SIGTERM, asked=True)), NodeFinished(2)],
        ],
        "cancelled": [
            [update(n, "cancelled", killed(n, SIGTERM, asked=True), cancelled=10.0), NodeFinished(n)]
            for n in range(3)
        ],
    }


@given(st.sampled_from(sorted(scripts())), st.randoms(use_true_random=False))
def test_verdict_does_not_depend_on_how_events_interleave(kind: str, random: Any) -> None:
    streams = scripts()[kind]
    expected = result([event for stream in streams for event in stream], nodes=3)
    left = [list(stream) for stream in streams]
    mixed: list[Event] = []
    while any(left):
        mixed.append(random.choice([stream for stream in left if stream]).pop(0))
    assert result(mixed, nodes=3) == expected


NOTICE = Failure(0, Cause.NOTICE, detail="a spot notice")


def test_notice_before_the_end_is_named_for_a_preempted_job() -> None:
    end = agreed("failed", NOTICE, 143)
    found = result([update(0, "failed", rank(0, 143), training=SAVED, verdict=end), *FINISHED])
    assert (found.status, found.exit_code) == ("preempted", 143)
    assert "a spot notice" in found.cause


def test_agent_that_ended_without_a_verdict_is_the_cause() -> None:
    states = [JobUpdate(0, job("lost", rank(0), node=0)), JobUpdate(1, job("failed", node=1))]
    found = result([*states, *FINISHED])
    assert (found.status, found.exit_code) == ("failed", 1)
    assert found.cause.startswith("node 0")


def test_exit_code_is_that_of_the_setup_commands() -> None:
    for code, expected in ((None, 1), (9, 9)):
        assert result([update(0, "failed", setup=True, exit_code=code), *FINISHED]).exit_code == expected


def test_ranks_of_a_success_are_all_or_unknown() -> None:
    end = agreed("succeeded")
    events = [update(node, "succeeded", rank(node, 0), verdict=end) for node in (0, 1)]
    assert result([*events, *FINISHED]).ranks == 2
    assert result([events[0], *FINISHED]).ranks is None
    # The last state that a lost node sent has fewer ranks than it started, or not how many it started.
    for number, expected in ((4, 6), (None, 3)):
        old = update(1, "running", rank(1), expected=number)
        two = update(0, "succeeded", rank(0, 0), rank(2, 0), verdict=end)
        assert result([two, old, NodeFinished(0), LOST]).ranks == expected


def test_silent_and_lost_nodes_may_have_ended() -> None:
    end = agreed("failed", Failure(1, Cause.SILENT, peer=0))
    named = result([update(0, "failed", verdict=end), NodeFinished(0)])
    assert (named.suspect, named.doubtful) == (1, {1})
    assert result([update(0, "failed", rank(0, 1)), lost(1), NodeFinished(0)]).doubtful == {1}


@pytest.mark.parametrize(("restarts", "expected"), [((), 0), ((0, 0), 0), ((2, 1), 2)])
def test_restarts_are_those_of_the_node_with_the_most(restarts: tuple[int, ...], expected: int) -> None:
    states = [update(node, "failed", rank(node, 1), restarts=n) for node, n in enumerate(restarts)]
    assert result([*states, *FINISHED]).restarts == expected
