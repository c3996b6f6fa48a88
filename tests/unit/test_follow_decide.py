"""The next action for a job that is followed: state and time in, one action out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.jobstates import agreed, followed, lost, rank, update

from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.config.timing import Timing
from cloudddp.errors import NodeError
from cloudddp.job.follow.decide import Action, decide
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    Event,
    NodeDisconnected,
    NodeFinished,
    NodeLost,
    NodeQuiet,
    NodeReconnected,
    NodeResponding,
    NodeUnreachable,
)
from cloudddp.job.follow.state import FollowState

T = Timing()
CONTINUE, ASK_AWS, DONE = Action

RUNNING = [update(0, "running", rank(0)), update(1, "running", rank(1))]
FAILED = [update(0, "running", rank(0, 7)), update(1, "running", rank(1))]
SUCCEEDED = [update(0, "running", rank(0, 0)), update(1, "running", rank(1, 0))]
FINISHED = [NodeFinished(0), NodeFinished(1)]
AGREED = [update(0, "failed", rank(0, 7), verdict=agreed()), NodeFinished(0)]
NAMED = [update(0, "failed", verdict=agreed(first=Failure(1, Cause.AGENT))), NodeFinished(0)]
ANSWERED = [AwsAsked(), AwsReport()]
UNKNOWN, GONE = [NodeQuiet(1), *ANSWERED], AwsReport((lost(1, ended=True),))
FAULTY = NodeLost(1, "junk", 1.0, error=NodeError("junk"))


def case(name: str, events: Sequence[Event], action: Action, *, after: float = 1.0) -> Any:
    """A row: all events happen at one time, and the decision is made `after` seconds."""
    return pytest.param(events, after, action, id=name)


@pytest.mark.parametrize(
    ("events", "after", "action"),
    [
        case("the job runs", RUNNING, CONTINUE),
        case("one node has finished", [*RUNNING, NodeFinished(0)], CONTINUE),
        case("all nodes have finished", [*SUCCEEDED, *FINISHED], DONE),
        case("a reader has read all", [*RUNNING, *FINISHED], DONE),
        # The agents end the job; the follower waits for them.
        case("a rank fails", FAILED, CONTINUE, after=1e6),
        case("the job fails and ends at once", [*FAILED, *FINISHED], DONE),
        case("torchrun waits at its exit barrier", SUCCEEDED, CONTINUE, after=1e6),
        case("the nodes have agreed, and one of them still ends", [*RUNNING, *AGREED], CONTINUE, after=1e6),
        case("the nodes have agreed, without one that is quiet", [*RUNNING, *AGREED, NodeQuiet(1)], ASK_AWS),
        case("AWS knows nothing, and it was not connected to again", [*RUNNING, *AGREED, *UNKNOWN], CONTINUE),
        case("it cannot be connected to again", [*RUNNING, *AGREED, *UNKNOWN, NodeUnreachable(1)], DONE),
        case("it sends nothing on a new connection", [*RUNNING, *AGREED, *UNKNOWN, NodeReconnected(1)], DONE),
        case(
            "it sends its state on a new connection",
            [*RUNNING, *AGREED, *UNKNOWN, NodeReconnected(1), update(1, "running", rank(1))],
            CONTINUE,
        ),
        case("the quiet node responds again", [*RUNNING, *AGREED, NodeQuiet(1), NodeResponding(1)], CONTINUE),
        # The others have lost a node, and this computer has not noticed it: its connection says nothing.
        case("the verdict names a node as lost", [*RUNNING, *NAMED], ASK_AWS),
        case("AWS is soon asked again", [*RUNNING, *NAMED, *ANSWERED], ASK_AWS, after=T.ask_soon),
        case("AWS says that it has ended", [*RUNNING, *NAMED, AwsAsked(), GONE], DONE),
        # A node is lost.
        case("a node is lost", [*RUNNING, lost(1)], CONTINUE),
        case("a node is lost after the other has finished", [*RUNNING, NodeFinished(0), lost(1)], DONE),
        case("all nodes are lost: offline", [*RUNNING, lost(0), lost(1)], DONE),
        case("all instances have ended", [*RUNNING, lost(0, ended=True), lost(1, ended=True)], DONE),
        case("a node sends invalid replies", [*RUNNING, FAULTY], DONE),
        # A node is quiet.
        case("a node is quiet", [*RUNNING, NodeQuiet(1)], ASK_AWS),
        case("both nodes are quiet", [*RUNNING, NodeQuiet(0), NodeQuiet(1)], ASK_AWS),
        case("AWS has just been queried", UNKNOWN, CONTINUE, after=T.ask_again - 1),
        case("AWS is queried again", UNKNOWN, ASK_AWS, after=T.ask_again),
        case("the node responds again", [NodeQuiet(1), NodeResponding(1)], CONTINUE),
        case("AWS reports that it has ended", [*RUNNING, NodeQuiet(1), AwsAsked(), GONE], CONTINUE),
    ],
)
def test_decide(events: Sequence[Event], after: float, action: Action) -> None:
    start = 1000.0
    assert decide(followed(events, at=start), T, start + after) == action


def broken(at: float) -> FollowState:
    return FollowState.of([0, 1]).apply(NodeDisconnected(1), at)


def test_query_follows_a_broken_connection() -> None:
    assert decide(FollowState.of([0, 1]), T, 100.0) == CONTINUE
    assert decide(broken(100.0), T, 100.0) == ASK_AWS


def test_query_is_repeated_soon_then_seldom() -> None:
    """An instance that powers off is still `running` when its connection breaks."""
    asked = broken(100.0).apply(AwsAsked(), 100.0)
    assert decide(asked, T, 100.0 + T.ask_again) == CONTINUE  # the last answer has not come
    answered = asked.apply(AwsReport(()), 101.0)
    assert decide(answered, T, 100.0 + T.ask_soon / 2) == CONTINUE
    assert decide(answered, T, 100.0 + T.ask_soon) == ASK_AWS
    late = 100.0 + 2 * T.ask_again
    again = answered.apply(AwsAsked(), late).apply(AwsReport(()), late)
    assert decide(again, T, late + T.ask_soon) == CONTINUE
    assert decide(again, T, late + T.ask_again) == ASK_AWS


def test_no_query_for_a_node_that_is_connected_again_or_has_ended() -> None:
    assert decide(broken(100.0).apply(NodeReconnected(1), 101.0), T, 101.0) == CONTINUE
    assert decide(broken(100.0).apply(NodeFinished(1), 101.0), T, 101.0) == CONTINUE
