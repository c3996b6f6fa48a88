"""How a job ended, from the events of following it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobstates import SIGKILL, SIGTERM, agreed, followed, killed, lost, rank, update

from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.errors import NodeError
from cloudddp.job.follow.events import (
    Event,
    LogData,
    NodeFinished,
    NodeLost,
)
from cloudddp.job.follow.state import TAIL_LINES
from cloudddp.job.follow.verdict import JobResult, verdict

NOW = 1000.0
FINISHED = [NodeFinished(0), NodeFinished(1)]
SAVED = TrainingStatus(reported=1.0, state=TrainingState.PREEMPTED, step=7)
RANK_1 = Failure(1, Cause.RANK, 1, 7)


def result(events: Sequence[Event], *, nodes: int = 2) -> JobResult:
    return verdict(followed(events, nodes=nodes), "j", NOW)


def case(name: str, events: Sequence[Event], status: str, code: int, cause: str = "") -> Any:
    return pytest.param(events, status, code, cause, id=name)


@pytest.mark.parametrize(
    ("events", "status", "exit_code", "cause"),
    [
        case(
            "all succeeded",
            [update(0, "succeeded", rank(0, 0)), update(1, "succeeded", rank(1, 0)), *FINISHED],
            "succeeded",
            0,
        ),
        case(
            "a rank failed",
            [
                update(0, "failed", killed(0, SIGTERM, 20.0), stopping=True),
                update(1, "failed", rank(1, 7, 10.0)),
                *FINISHED,
            ],
            "failed",
            7,
            "rank 1 on node 1 exited with code 7 first",
        ),
        case(
            "a rank was killed",
            [update(0, "failed", rank(0, 1, 20.0)), update(1, "failed", killed(1, SIGKILL, 10.0)), *FINISHED],
            "failed",
            137,
            "rank 1 on node 1 was killed by SIGKILL first",
        ),
        case(
            "a rank was killed by SIGTERM from outside",
            [
                update(0, "failed", rank(0, 1, 20.0)),
                update(1, "failed", killed(1, SIGTERM, 10.0), stopping=True),
                *FINISHED,
            ],
            "failed",
            143,
            "rank 1 on node 1 was killed by SIGTERM first",
        ),
        case(
            "cancelled",
            [
                update(0, "cancelled", killed(0, SIGTERM, 11.0), cancelled=10.0, stopping=True),
                update(1, "cancelled"),
                *FINISHED,
            ],
            "cancelled",
            130,
        ),
        case(
            "failed before it was cancelled",
            [
                update(0, "cancelled", killed(0, SIGTERM, 11.0), cancelled=10.0, stopping=True),
                update(1, "cancelled", rank(1, 9, 5.0), cancelled=10.0, stopping=True),
                *FINISHED,
            ],
            "failed",
            9,
            "rank 1 on node 1 exited with code 9 first",
        ),
        case(
            "preempted",
            [
                update(0, "failed", rank(0, 143, 5.0), training=SAVED),
                update(1, "failed", rank(1, 143)),
                *FINISHED,
            ],
            "preempted",
            143,
            "its ranks were asked to stop (SIGTERM)",
        ),
        case(
            "exit codes override the script's report",
            [
                update(0, "failed", rank(0, 7, 5.0), training=SAVED),
                update(1, "succeeded", rank(1, 0)),
                *FINISHED,
            ],
            "failed",
            7,
            "rank 0 on node 0 exited with code 7 first",
        ),
        case(
            "the launcher failed",
            [
                update(0, "failed", exit_code=2, ended=9.0),
                update(1, "failed", exit_code=1, ended=5.0),
                *FINISHED,
            ],
            "failed",
            1,
            "node 1: the launcher exited with code 1 before its ranks had finished",
        ),
        case(
            "the processes could not be started",
            [update(0, "failed", exit_code=127, error="no such file: python9"), *FINISHED],
            "failed",
            127,
            "node 0: no such file: python9",
        ),
        case(
            "the launcher failed, and the ranks of the other node were stopped for it",
            [
                update(0, "failed", killed(0, SIGTERM, 12.0), stopping=True, exit_code=143, ended=12.1),
                update(1, "failed", exit_code=1, ended=10.0, expected=1),
                *FINISHED,
            ],
            "failed",
            1,
            "node 1: the launcher exited with code 1 before its ranks had finished",
        ),
        case(
            "a supervisor was lost, and the ranks of the other node were stopped for it",
            [
                update(0, "failed", killed(0, SIGTERM, 12.0), stopping=True, exit_code=143, ended=12.1),
                update(1, "lost", rank(1)),
                *FINISHED,
            ],
            "failed",
            1,
            "node 1: the launcher exited before its ranks had finished",
        ),
        case(
            "a supervisor was lost",
            [update(0, "lost"), update(1, "succeeded", rank(1, 0)), *FINISHED],
            "failed",
            1,
            "node 0: the launcher exited before its ranks had finished",
        ),
        case(
            "success is reported, but a rank failed",
            [update(0, "succeeded", rank(0, 0)), update(1, "succeeded", rank(1, 3), exit_code=0), *FINISHED],
            "failed",
            3,
            "rank 1 on node 1 exited with code 3 first",
        ),
        case(
            "success is reported, but no rank",
            [update(0, "succeeded", rank(0, 0)), update(1, "succeeded", expected=4, exit_code=0), *FINISHED],
            "failed",
            1,
            "node 1: the launcher exited with code 0 before its ranks had finished",
        ),
        case(
            "success is reported, but no rank, and the ranks of the other node were stopped for it",
            [
                update(0, "failed", killed(0, SIGTERM, 12.0), stopping=True, exit_code=143, ended=12.1),
                update(1, "succeeded", exit_code=0, ended=10.0, expected=1),
                *FINISHED,
            ],
            "failed",
            1,
            "node 1: the launcher exited with code 0 before its ranks had finished",
        ),
        case(
            "still running after a rank failed, for a reader",
            [update(0, "failed", rank(0, 3)), update(1, "running", rank(1)), *FINISHED],
            "running",
            3,
        ),
        case(
            "still running, for a reader",
            [update(0, "running", rank(0)), update(1, "running", rank(1)), *FINISHED],
            "running",
            0,
        ),
        case("nothing is known, for a reader", FINISHED, "running", 0),
        # The nodes have agreed.
        case(
            "the verdict names another cause than the clocks of the nodes",
            [
                update(0, "failed", rank(0, 1, 5.0), verdict=agreed("failed", RANK_1, 7)),
                update(1, "failed", rank(1, 7, 10.0), verdict=agreed("failed", RANK_1, 7)),
                *FINISHED,
            ],
            "failed",
            7,
            "rank 1 on node 1 exited with code 7",
        ),
        case(
            "a node was lost to this computer alone",
            [
                update(0, "succeeded", rank(0, 0), verdict=agreed("succeeded")),
                update(1, "running", rank(1)),
                NodeFinished(0),
                lost(1, 990.0),
            ],
            "succeeded",
            0,
        ),
        case(
            "a node was lost, and a rank of another one had failed before",
            [
                update(0, "failed", rank(0, 1), verdict=agreed("failed", RANK_1, 7)),
                NodeFinished(0),
                lost(1, 1.0),
            ],
            "failed",
            7,
            "rank 1 on node 1 exited with code 7",
        ),
        case(
            "no node knows why",
            [update(0, "failed", rank(0, 143), verdict=agreed("failed", None, 143)), *FINISHED],
            "failed",
            143,
            "its ranks were ended, and no node knows why",
        ),
        case(
            "preempted by agreement",
            [
                update(0, "failed", rank(0, 143), training=SAVED, verdict=agreed("failed", None, 143)),
                *FINISHED,
            ],
            "preempted",
            143,
            "its ranks were asked to stop (SIGTERM)",
        ),
        case(
            "cancelled by agreement",
            [
                update(0, "cancelled", rank(0, 143), verdict=agreed("cancelled")),
                update(1, "failed"),
                *FINISHED,
            ],
            "cancelled",
            130,
        ),
        case(
            "agreed on success, but a rank failed",
            [
                update(0, "succeeded", rank(0, 0), verdict=agreed("succeeded")),
                update(1, "succeeded", rank(1, 3), exit_code=0),
                *FINISHED,
            ],
            "failed",
            3,
            "rank 1 on node 1 exited with code 3 first",
        ),
        # Nodes are lost.
        case(
            "a node was lost",
            [update(0, "running", rank(0)), lost(1, 990.0)],
            "failed",
            1,
            "node 1 was lost: not responding for 10 s (no route to host)",
        ),
        case(
            "the other ranks were stopped because of it",
            [lost(1, 990.0), update(0, "failed", killed(0, SIGTERM, 995.0), stopping=True), NodeFinished(0)],
            "failed",
            1,
            "node 1 was lost: not responding for 10 s (no route to host)",
        ),
        case(
            "the other ranks failed because of it",
            [update(0, "failed", rank(0, 1, 995.0)), lost(1, 990.0), NodeFinished(0)],
            "failed",
            1,
            "node 1 was lost: not responding for 10 s (no route to host)",
        ),
        case(
            "a rank failed before a node was lost",
            [
                update(0, "failed", rank(0, 7, 980.0)),
                update(1, "running", rank(1)),
                lost(1, 990.0),
                NodeFinished(0),
            ],
            "failed",
            7,
            "rank 0 on node 0 exited with code 7 first",
        ),
        case(
            "a rank failed on a node that was then lost",
            [
                update(1, "failed", rank(1, 7, 980.0)),
                lost(1, 990.0),
                update(0, "failed", killed(0, SIGTERM, 985.0), stopping=True),
                NodeFinished(0),
            ],
            "failed",
            7,
            "rank 1 on node 1 exited with code 7 first",
        ),
        case(
            "cancelled before a node was lost",
            [
                update(0, "cancelled", killed(0, SIGTERM, 981.0), cancelled=980.0, stopping=True),
                NodeFinished(0),
                update(1, "running", rank(1)),
                lost(1, 990.0),
            ],
            "cancelled",
            130,
        ),
        case(
            "a node was lost after it had succeeded",
            [
                update(0, "succeeded", rank(0, 0)),
                update(1, "succeeded", rank(1, 0)),
                NodeFinished(0),
                lost(1, 990.0),
            ],
            "failed",
            1,
            "node 1 was lost: not responding for 10 s (no route to host)",
        ),
        case(
            "offline",
            [update(0, "running", rank(0)), lost(0, 990.0), lost(1, 990.0)],
            "unknown",
            1,
            "lost connection to all nodes; the job may still be running",
        ),
        case(
            "offline, after a rank failed",
            [update(0, "failed", rank(0, 7, 1.0)), lost(0, 990.0), lost(1, 990.0)],
            "unknown",
            1,
            "lost connection to all nodes; the job may still be running",
        ),
        case(
            "one instance has ended, the other node is lost",
            [lost(0, 990.0, ended=True), lost(1, 990.0)],
            "unknown",
            1,
            "lost connection to all nodes; the job may still be running",
        ),
        case(
            "all instances have ended",
            [lost(0, 990.0, ended=True), lost(1, 990.0, ended=True)],
            "failed",
            1,
            "none of its nodes is running any more; node 0: no route to host",
        ),
        case(
            "a node sends invalid replies",
            [
                update(0, "failed", rank(0, 7, 1.0)),
                NodeLost(1, "junk", 990.0, error=NodeError("node 1 sent junk")),
            ],
            "failed",
            1,
            "node 1 sent junk",
        ),
    ],
)
def test_verdict(events: Sequence[Event], status: str, exit_code: int, cause: str) -> None:
    found = result(events)
    assert (found.status, found.exit_code, found.cause) == (status, exit_code, cause)


def test_last_lines_are_those_of_the_first_failing_rank() -> None:
    lines = [f"line {number}" for number in range(50)]
    found = result(
        [
            LogData(0, 0, b"of another rank\n"),
            LogData(0, 1, "\n".join(lines).encode()),
            update(0, "failed", rank(0, 1, 9.0), rank(1, 7, 5.0)),
            *FINISHED,
        ]
    )
    assert found.last_lines == tuple(lines[-TAIL_LINES:])
    assert found.ranks == 2


def test_last_lines_of_a_launcher_failure_are_the_launchers() -> None:
    found = result(
        [
            LogData(0, -1, b"rendezvous timed out\n"),
            LogData(0, 0, b"hello\n"),
            update(0, "failed", exit_code=1),
            *FINISHED,
        ]
    )
    assert found.last_lines == ("rendezvous timed out",)


def test_last_lines_of_the_verdict_are_shown() -> None:
    """A client that lacks the log of the node that failed still shows why."""
    end = agreed("failed", Failure(1, Cause.RANK, 1, 7), 7, "the last", "words")
    found = result([LogData(0, 0, b"hello\n"), update(0, "failed", rank(0, 143), verdict=end), *FINISHED])
    assert found.last_lines == ("the last", "words")


def test_lost_nodes_are_listed_with_their_reasons() -> None:
    found = result([lost(2, reason="connection reset"), lost(0), NodeFinished(1)], nodes=3)
    assert (found.lost, found.lost_reasons) == ((0, 2), ("no route to host", "connection reset"))


def test_nodes_that_have_not_ended_their_streams_are_unverified() -> None:
    first = Failure(1, Cause.SILENT, peer=0)
    silent = [
        update(0, "failed", verdict=agreed("failed", first)),
        update(1, "running", rank(1)),
        NodeFinished(0),
    ]
    found = result(silent)
    assert (found.status, found.exit_code, found.unverified) == ("failed", 1, (1,))
    assert found.cause == "node 1 was lost: it sent nothing to node 0"


def scripts() -> dict[str, list[list[Event]]]:
    """What each of three nodes reports, in its own order, in jobs of several kinds."""
    return {
        "succeeded": [
            [
                LogData(n, n, b"a\nb"),
                update(n, "running", rank(n)),
                update(n, "succeeded", rank(n, 0)),
                NodeFinished(n),
            ]
            for n in range(3)
        ],
        "failed": [
            [
                LogData(0, 0, b"x\n"),
                update(0, "failed", killed(0, SIGTERM, 12.0), stopping=True),
                NodeFinished(0),
            ],
            [
                LogData(1, 1, b"boom"),
                update(1, "running", rank(1, 7, 10.0)),
                update(1, "failed", rank(1, 7, 10.0)),
                NodeFinished(1),
            ],
            [update(2, "failed", rank(2, 1, 11.0)), NodeFinished(2)],
        ],
        "lost": [
            [update(0, "failed", rank(0, 1, 12.0)), NodeFinished(0)],
            [LogData(1, 1, b"half a li"), update(1, "running", rank(1)), lost(1, 5.0)],
            [update(2, "failed", killed(2, SIGTERM, 13.0), stopping=True), NodeFinished(2)],
        ],
        "cancelled": [
            [update(n, "cancelled", killed(n, SIGTERM, 11.0), cancelled=10.0, stopping=True), NodeFinished(n)]
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


def test_duration_is_that_of_the_nodes_clocks() -> None:
    """The clock of node 1 is 500 s ahead."""
    ends = [
        update(0, "succeeded", rank(0, 0), started=100.0, ended=110.0),
        update(1, "succeeded", rank(1, 0), started=600.0, ended=612.0),
    ]
    assert verdict(followed([*ends, NodeFinished(0), NodeFinished(1)]), "j", 5000.0).seconds == 12.0
