"""AWS is asked about the instances of nodes as soon as their connections break."""

from __future__ import annotations

from cloudddp.config.timing import Timing
from cloudddp.job.follow.decide import AskAws, Continue, Policy, decide
from cloudddp.job.follow.events import AwsAsked, AwsReport, NodeDisconnected, NodeFinished, NodeReconnected
from cloudddp.job.follow.state import FollowState

T = Timing()
POLICY = Policy(timing=T)


def broken(at: float) -> FollowState:
    return FollowState.of([0, 1]).apply(NodeDisconnected(1), at)


def test_query_follows_a_broken_connection() -> None:
    assert decide(FollowState.of([0, 1]), POLICY, 100.0) == Continue()
    assert decide(broken(100.0), POLICY, 100.0) == AskAws(frozenset({1}))


def test_query_is_repeated_soon_then_seldom() -> None:
    """An instance that powers off is still `running` when its connection breaks."""
    asked = broken(100.0).apply(AwsAsked(), 100.0)
    assert decide(asked, POLICY, 100.0 + T.ask_again) == Continue()  # the last answer has not come
    answered = asked.apply(AwsReport(()), 101.0)
    assert decide(answered, POLICY, 100.0 + T.ask_soon / 2) == Continue()
    assert decide(answered, POLICY, 100.0 + T.ask_soon) == AskAws(frozenset({1}))
    late = 100.0 + 2 * T.ask_again
    again = answered.apply(AwsAsked(), late).apply(AwsReport(()), late)
    assert decide(again, POLICY, late + T.ask_soon) == Continue()
    assert decide(again, POLICY, late + T.ask_again) == AskAws(frozenset({1}))


def test_no_query_for_a_node_that_is_connected_again_or_has_ended() -> None:
    assert decide(broken(100.0).apply(NodeReconnected(1), 101.0), POLICY, 101.0) == Continue()
    assert decide(broken(100.0).apply(NodeFinished(1), 101.0), POLICY, 101.0) == Continue()
