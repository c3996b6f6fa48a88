"""The state of a job that is followed, after its events."""

from __future__ import annotations

from support.jobstates import agreed, followed, lost, rank, update

from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    LogData,
    NodeFinished,
    NodeQuiet,
)
from cloudddp.job.follow.state import TAIL_LINE_LENGTH, TAIL_LINES, FollowState, Line


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
    assert (state.quiet, state.aws_pending, state.all_lost, state.all_ended) == (set(), False, False, False)
    assert followed([AwsAsked(), report]).all_ended
    assert not followed([lost(0), report]).all_ended


def test_verdict_is_known_once_any_node_has_reported_it() -> None:
    failed = agreed("failed", Failure(1, Cause.SILENT))
    assert followed([update(0, "running"), update(1, "running")]).agreed is None
    assert followed([update(0, "running"), update(1, "failed", verdict=failed)]).agreed == failed


def test_verdict_of_the_first_node_counts_where_nodes_have_decided_apart() -> None:
    one, other = agreed("failed", Failure(1, Cause.SILENT)), agreed("failed", Failure(0, Cause.SILENT))
    events = [update(1, "failed", verdict=other), update(0, "failed", verdict=one)]
    assert followed(events).agreed == one


def test_success_that_a_node_contradicts_is_no_verdict() -> None:
    events = [
        update(0, "succeeded", rank(0, 0), verdict=agreed("succeeded")),
        update(1, "succeeded", rank(1, 3), verdict=agreed("succeeded")),
    ]
    assert followed(events).agreed is None
    assert followed(events[:1]).agreed == agreed("succeeded")
