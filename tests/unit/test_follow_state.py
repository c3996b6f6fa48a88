"""The state of a job that is followed, after its events, and what is due in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.jobstates import agreed, followed, job, lost, rank, update

from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.cli.actions.follow import report_silence
from cloudddp.cli.console import Console
from cloudddp.config.timing import Timing
from cloudddp.job.follow.decide import liveness_changes, silence_due
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    BarsDue,
    Event,
    JobUpdate,
    LogData,
    NodeFinished,
    NodeLost,
    NodeQuiet,
    NodeResponding,
    Silence,
)
from cloudddp.job.follow.state import TAIL_LINE_LENGTH, TAIL_LINES, FollowState, Line
from cloudddp.job.follow.stream import Liveness


def test_lines_of_the_last_event_are_complete_ones() -> None:
    state = FollowState.of([0])
    found = []
    for event in (LogData(0, 3, b"a\nb"), LogData(0, 4, b"other\n"), LogData(0, 3, b"c\n"), NodeQuiet(0)):
        state = state.apply(event, 0.0)
        found.append(state.lines)
    assert found == [(Line(0, 3, "a"),), (Line(0, 4, "other"),), (Line(0, 3, "bc"),), ()]


def test_incomplete_last_lines_are_shown_at_the_end() -> None:
    for end in (NodeFinished(0), lost(0)):
        state = followed([LogData(0, 0, b"zero"), LogData(0, 1, b"one"), LogData(1, 2, b"two"), end])
        assert state.lines == (Line(0, 0, "zero"), Line(0, 1, "one"))
        assert state.followed == {1}


def test_tail_is_bounded() -> None:
    state = FollowState.of([0])
    for number in range(100):
        state = state.apply(LogData(0, 0, b"%d " % number + b"x" * 10_000 + b"\n"), 0.0)
    tail = state.nodes[0].logs[0].tail
    assert [int(line.split()[0]) for line in tail] == list(range(100 - TAIL_LINES, 100))
    assert {len(line) for line in tail} == {TAIL_LINE_LENGTH}


def test_applying_an_event_leaves_the_old_state_unchanged() -> None:
    before = followed([LogData(0, 0, b"a\nb")])
    after = before.apply(LogData(0, 0, b"c\n"), 0.0).apply(NodeFinished(0), 0.0)
    assert before == followed([LogData(0, 0, b"a\nb")])
    assert after != before


def test_node_that_is_not_followed_any_more_cannot_be_lost() -> None:
    assert followed([NodeFinished(0), lost(0)]).lost == {}
    assert followed([lost(0, reason="first"), lost(0, reason="second")]).lost[0].reason == "first"


def test_instances_that_have_ended_are_lost_nodes() -> None:
    report = AwsReport((lost(0, ended=True), lost(1, ended=True)))
    state = followed([NodeQuiet(0), AwsAsked(), NodeFinished(1), report])
    assert list(state.lost) == [0]
    assert (state.quiet, state.aws_pending) == (set(), False)
    assert not followed([lost(0), report]).lost[0].instance_ended


def test_verdict_is_known_once_any_node_has_reported_it() -> None:
    """That of the first node counts where nodes have decided apart; one of success that a node contradicts is
    none."""
    one, other = agreed("failed", Failure(1, Cause.SILENT)), agreed("failed", Failure(0, Cause.SILENT))
    assert followed([update(0, "running"), update(1, "running")]).agreed is None
    assert followed([update(0, "running"), update(1, "failed", verdict=one)]).agreed == one
    assert followed([update(1, "failed", verdict=other), update(0, "failed", verdict=one)]).agreed == one
    success = agreed("succeeded")
    events = [update(n, "succeeded", rank(n, code), verdict=success) for n, code in enumerate((0, 3))]
    assert followed(events).agreed is None
    assert followed(events[:1]).agreed == success


TIMING = replace(Timing(), bars=5.0, no_output=60.0)


def due(state: FollowState, now: float) -> list[Event]:
    return list(silence_due(state, TIMING, now))


def test_last_state_of_a_progress_bar_is_shown_once() -> None:
    state = followed([LogData(0, 2, b"\r 10%\r 20%")])
    assert due(state, 4.9) == []
    assert due(state, 5.0) == [BarsDue()]
    shown = state.apply(BarsDue(), 5.0)
    assert shown.lines == (Line(0, 2, " 20%"),)
    assert shown.nodes[0].logs[2].tail == ()
    assert due(shown, 9.9) == []
    assert shown.apply(BarsDue(), 10.0).lines == ()  # it has not changed
    later = shown.apply(LogData(0, 2, b"\r 30%"), 6.0)
    assert later.apply(BarsDue(), 10.0).lines == (Line(0, 2, " 30%"),)
    assert later.apply(LogData(0, 2, b"\r100%\n"), 7.0).lines == (Line(0, 2, "100%"),)
    no_bar = followed([LogData(0, 0, b"epoch 1 ... ")])  # nothing overwrites it
    assert due(no_bar, 30.0) == []
    assert no_bar.apply(BarsDue(), 30.0).lines == ()


def test_silence_is_reported_every_minute_until_there_is_output() -> None:
    training = TrainingStatus(reported=1.0, step=120)
    state = followed([LogData(1, 2, b"x\n"), JobUpdate(0, job("running", rank(0), training=training))])
    assert due(state, 59.0) == []
    assert due(state, 60.0) == [Silence(60.0, 2, "step 120")]
    again = state.apply(Silence(60.0, 2, "step 120"), 60.0)
    assert due(again, 119.0) == []
    assert due(again, 125.0) == [Silence(125.0, 2, "step 120")]
    assert due(again.apply(LogData(0, 0, b"y"), 125.0), 126.0) == []
    # Since the start, and where a node is the reason.
    assert due(followed([LogData(0, -1, b"from torchrun\n")]), 61.0) == [Silence(61.0, None, "")]
    for event, nodes in ((NodeQuiet(1), 2), (lost(0), 1)):
        assert due(followed([LogData(0, 0, b"x"), event], nodes=nodes), 500.0) == []


def test_silence_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (Silence(125.0, 2, "step 120"), Silence(30.0, None, "")):
        report_silence(Console(), "job-1", silent)
    where = ". `cloudddp stacks job-1` shows where each rank is"
    assert capsys.readouterr().err.splitlines() == [
        f"no output from any rank for 2 min; rank 2 was the last (step 120){where}",
        f"no output from any rank for 30 s since the job was started{where}",
    ]


T = Timing()
WALL = 5000.0
OVERDUE = NodeLost(1, "no heartbeat for 120 s", WALL - 121)


def case(name: str, before: list[Event], silence: Mapping[int, float], *found: Event) -> Any:
    """A row: the events so far, for how long each node has been silent, and the resulting events."""
    return pytest.param(before, silence, list(found), id=name)


@pytest.mark.parametrize(
    ("before", "silence", "found"),
    [
        case("one is quiet", [], {0: 0.0, 1: 16.0}, NodeQuiet(1)),
        case("all are quiet", [], {0: 16.0, 1: 16.0}, NodeQuiet(0), NodeQuiet(1)),
        case("one responds again", [NodeQuiet(1)], {0: 0.0, 1: 1.0}, NodeResponding(1)),
        case("one is overdue", [NodeQuiet(1)], {0: 0.0, 1: 121.0}, OVERDUE),
        case("all are overdue: offline", [NodeQuiet(0), NodeQuiet(1)], {0: 121.0, 1: 121.0}),
        case("one that has finished is not quiet", [NodeFinished(1)], {0: 0.0, 1: 99.0}),
        case("one that has finished answers", [NodeQuiet(1), NodeFinished(0)], {0: 9.0, 1: 121.0}, OVERDUE),
        case("one that has finished does not answer", [NodeQuiet(1), NodeFinished(0)], {0: 11.0, 1: 121.0}),
    ],
)
def test_silent_node_is_quiet_then_lost(
    before: list[Event], silence: Mapping[int, float], found: list[Event]
) -> None:
    now = 1000.0
    last_seen = {node: now - seconds for node, seconds in silence.items()}
    assert list(liveness_changes(followed(before), last_seen, now=now, wall=WALL, timing=T)) == found


@pytest.mark.parametrize(
    ("others", "broken", "give_up"),
    [
        pytest.param([], 299.0, False, id="offline for minutes"),
        pytest.param([], 301.0, True, id="offline for too long"),
        pytest.param([100.0], 19.0, False, id="just broken"),
        pytest.param([100.0], 21.0, True, id="others answer"),
        pytest.param([5.0], 60.0, False, id="others have just come back"),
        pytest.param([-100.0], 60.0, False, id="the other one is silent, too"),
    ],
)
def test_reconnecting_is_given_up_sooner_while_others_answer(
    others: list[float], broken: float, give_up: bool
) -> None:
    """`others`: for how many seconds each other node has answered, or before how many it did for the last
    time (< 0); `broken`: for how many seconds this one has not answered."""
    clock = [time.monotonic()]
    start = clock[0]
    found = Liveness(range(len(others) + 1), T)
    found.clock = lambda: clock[0]
    found.received(0)
    for node, seconds in enumerate(others, start=1):
        clock[0] = start + 1000 - abs(seconds)
        found.received(node)
    clock[0] = start + 1000
    for node, seconds in enumerate(others, start=1):
        if seconds >= 0:
            found.received(node)
    found.broken(0)
    assert found.should_give_up(0, clock[0] - broken) is give_up
