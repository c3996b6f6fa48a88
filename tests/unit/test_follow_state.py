"""The state of a job that is followed, after its events."""

from __future__ import annotations

from support.jobstates import followed, lost, rank, update

from cloudddp.agent.protocol.kill import StopReason
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    LogData,
    NodeFinished,
    NodeQuiet,
    StopEnded,
    StopRequest,
    StopStarted,
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


def test_ranks_finished_at_is_when_the_last_one_finished() -> None:
    done = [update(node, "running", rank(node, 0)) for node in (0, 1)]
    state = FollowState.of([0, 1]).apply(done[0], 1.0)
    assert state.ranks_finished_at is None
    state = state.apply(done[1], 2.0).apply(LogData(0, 0, b"bye\n"), 3.0).apply(done[0], 4.0)
    assert state.ranks_finished_at == 2.0
    assert state.apply(update(0, "running", rank(0)), 5.0).ranks_finished_at is None
    assert state.apply(NodeFinished(0), 5.0).apply(NodeFinished(1), 6.0).ranks_finished_at is None


def test_closed_at_is_when_the_last_node_finished() -> None:
    state = FollowState.of([0, 1]).apply(NodeFinished(0), 1.0)
    assert state.closed_at is None
    state = state.apply(lost(1), 2.0).apply(update(0, "failed"), 3.0)
    assert state.closed_at == 2.0


def test_stop_is_repeated_where_it_was_not_confirmed() -> None:
    none: frozenset[int] = frozenset()
    request = StopRequest(5.0, StopReason.FAILURE)
    state = followed([StopStarted(request, frozenset({0, 1}))])
    assert (state.stop, state.stop_pending, state.unverified) == (request, True, (0, 1))
    state = state.apply(StopEnded(frozenset({0}), none, frozenset({1})), 7.0)
    assert (state.stop_pending, state.stop_ended_at, state.unverified) == (False, 7.0, (1,))
    state = state.apply(StopStarted(request, frozenset({1})), 9.0)
    state = state.apply(StopEnded(frozenset({1}), none, none), 9.0)
    assert state.unverified == ()
