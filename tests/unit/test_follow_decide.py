"""The next action for a job that is followed: state, policy and time in, one action out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.jobstates import followed, lost, rank, update

from cloudddp.agent.protocol.kill import StopReason
from cloudddp.config.timing import Timing
from cloudddp.errors import NodeError
from cloudddp.job.follow.decide import (
    Action,
    AskAws,
    Continue,
    Done,
    EndExitBarrier,
    Policy,
    StopAgain,
    StopJob,
    decide,
)
from cloudddp.job.follow.events import (
    AwsAsked,
    AwsReport,
    Event,
    LogData,
    NodeFinished,
    NodeLost,
    NodeQuiet,
    NodeResponding,
    StopEnded,
    StopRequest,
    StopStarted,
)

T = Timing()
OWNER = Policy(grace=60.0, stop_on_failure=True, stop_on_loss=True, timing=T)
VIEWER = Policy(grace=60.0, stop_on_failure=True, timing=T)
READER = Policy(grace=60.0, wait=False, timing=T)  # `logs` without -f

BOTH = frozenset({0, 1})
NONE: frozenset[int] = frozenset()
RUNNING = [update(0, "running", rank(0)), update(1, "running", rank(1))]
FAILED = [update(0, "running", rank(0, 7)), update(1, "running", rank(1))]
SUCCEEDED = [update(0, "running", rank(0, 0)), update(1, "running", rank(1, 0))]
FINISHED = [NodeFinished(0), NodeFinished(1)]
REQUEST = StopRequest(5.0, StopReason.FAILURE)
STOP = StopStarted(REQUEST, BOTH)
STOPPED = StopEnded(BOTH, NONE, NONE)
STOPPED_0 = StopEnded(frozenset({0}), NONE, frozenset({1}))
SURVIVING = StopEnded(frozenset({0}), frozenset({1}), NONE)
STOP_AGAIN = StopAgain(REQUEST, frozenset({1}))
BARRIER = StopStarted(StopRequest(1.0, StopReason.FINISHED), BOTH)
FAULTY = NodeLost(1, "junk", 1.0, error=NodeError("junk"))
STOP_ON_FAILURE = StopJob(T.fail_grace, "rank failed")
STOP_ON_LOSS = StopJob(T.fail_grace, "node lost")


def case(
    name: str, events: Sequence[Event], action: Action, *, policy: Policy = OWNER, after: float = 1.0
) -> Any:
    """A row: all events happen at one time, and the decision is made `after` seconds."""
    return pytest.param(events, policy, after, action, id=name)


@pytest.mark.parametrize(
    ("events", "policy", "after", "action"),
    [
        case("nothing is known yet", [], Continue()),
        case("the job runs", RUNNING, Continue()),
        case("the job runs for days", RUNNING, Continue(), after=1e6),
        case("one node has finished", [*RUNNING, NodeFinished(0)], Continue()),
        case("all nodes have finished", [*SUCCEEDED, *FINISHED], Done()),
        case("a reader has read all", [*RUNNING, *FINISHED], Done(), policy=READER),

        # A rank fails.
        case("a rank fails", FAILED, STOP_ON_FAILURE),
        case("a rank fails, policy of a viewer", FAILED, STOP_ON_FAILURE, policy=VIEWER),
        case("a rank fails, policy of a reader", FAILED, Continue(), policy=READER),
        case("a short grace is kept", FAILED, StopJob(1.0, "rank failed"), policy=Policy(1.0, True, timing=T)),
        case("a rank fails, torchrun restarts it", [update(0, "running", rank(0, 7), max_restarts=2)], Continue()),
        case("another command stops the job", [update(0, "running", rank(0, 7), stopping=True)], Continue()),
        case("the job fails and ends at once", [*FAILED, *FINISHED], STOP_ON_FAILURE),
        case("the launcher fails", [update(0, "failed", exit_code=1)], STOP_ON_FAILURE),
        case("success is reported, but no rank", [update(0, "succeeded", expected=4), *RUNNING[1:]], STOP_ON_FAILURE),

        # A stop is in progress.
        case("the stop request is being sent", [*FAILED, STOP], Continue(), after=1e6),
        case("all have confirmed, logs are still being read", [*FAILED, STOP, STOPPED], Continue(), after=OWNER.grace + 29),
        case("all have confirmed, a node does not end its stream", [*FAILED, STOP, STOPPED], Done(), after=OWNER.grace + 31),
        case("one has finished, the other does not end its stream", [*FAILED, STOP, STOPPED, NodeFinished(0)], Done(), after=99),
        case("processes survive, and the stream stays open", [*FAILED, STOP, SURVIVING, NodeFinished(0)], Done(), after=99),
        case("the stream that stays open is quiet", [*FAILED, STOP, STOPPED, NodeQuiet(1), AwsAsked()], Continue(), after=1e6),
        case("an unreached node that responds cannot be stopped", [*FAILED, STOP, STOPPED_0, NodeFinished(0)], STOP_AGAIN, after=99),
        case("a viewer ends, too", [*FAILED, STOP, STOPPED], Done(), policy=VIEWER, after=99),
        case("all have finished, replies are outstanding", [*FAILED, STOP, *FINISHED], Continue(), after=OWNER.grace + 29),
        case("replies are overdue", [*FAILED, STOP, *FINISHED], Done(), after=OWNER.grace + 31),
        case("all have finished and replied", [*FAILED, STOP, *FINISHED, STOPPED], Done()),
        case("the stop request has just failed on a node", [*FAILED, STOP, STOPPED_0], Continue(), after=0.1),
        case("the stop request has failed, before the retry interval", [*FAILED, STOP, STOPPED_0], Continue(), after=T.stop_again),
        case(
            "the stop request is repeated", [*FAILED, STOP, STOPPED_0], STOP_AGAIN, after=T.stop_again + 1
        ),
        case("the unreached node has finished", [*FAILED, STOP, STOPPED_0, NodeFinished(1)], Continue(), after=OWNER.grace),
        case("the repeated stop request is being sent", [*FAILED, STOP, STOPPED_0, STOP], Continue(), after=99),
        case("processes survive: no second stop", [*FAILED, STOP, StopEnded(NONE, BOTH, NONE)], Continue(), after=OWNER.grace),

        # A node is lost.
        case("a node is lost", [*RUNNING, lost(1)], STOP_ON_LOSS),
        case("a node is lost, policy of a viewer", [*RUNNING, lost(1)], Continue(), policy=VIEWER),
        case("a node is lost after the other has finished", [*RUNNING, NodeFinished(0), lost(1)], STOP_ON_LOSS),
        case("all nodes are lost: offline", [*RUNNING, lost(0), lost(1)], Done()),
        case("all instances have ended", [*RUNNING, lost(0, ended=True), lost(1, ended=True)], Done()),
        case("a node sends invalid replies", [*RUNNING, FAULTY], STOP_ON_LOSS),
        case("all remaining nodes send invalid replies", [*RUNNING, lost(0), FAULTY], STOP_ON_LOSS),

        # A node is quiet.
        case("a node is quiet", [*RUNNING, NodeQuiet(1)], AskAws(frozenset({1}))),
        case("both nodes are quiet", [*RUNNING, NodeQuiet(0), NodeQuiet(1)], AskAws(BOTH)),
        case("a node is quiet, policy of a reader", [NodeQuiet(1)], AskAws(frozenset({1})), policy=READER),
        case("a query to AWS is in progress", [NodeQuiet(1), AwsAsked()], Continue(), after=1e6),
        case("AWS has just been queried", [NodeQuiet(1), AwsAsked(), AwsReport()], Continue(), after=T.ask_again - 1),
        case(
            "AWS is queried again", [NodeQuiet(1), AwsAsked(), AwsReport()], AskAws(frozenset({1})), after=T.ask_again
        ),
        case("the node responds again", [NodeQuiet(1), NodeResponding(1)], Continue()),
        case("AWS reports that the instance has ended", [NodeQuiet(1), AwsAsked(), AwsReport((lost(1, ended=True),))], STOP_ON_LOSS),
        case("a rank fails while a node is quiet", [*FAILED, NodeQuiet(1)], STOP_ON_FAILURE),

        # The exit barrier.
        case("ranks have just finished", SUCCEEDED, Continue(), after=0.1),
        case("ranks have finished a while ago", SUCCEEDED, Continue(), after=T.exit_barrier),
        case("torchrun waits at its exit barrier", SUCCEEDED, EndExitBarrier(), after=T.exit_barrier + 1),
        case("torchrun of one node has left the exit barrier", [*SUCCEEDED, NodeFinished(0)], EndExitBarrier(), after=T.exit_barrier + 1),
        case("a viewer ends the exit barrier, too", SUCCEEDED, EndExitBarrier(), policy=VIEWER, after=99),
        case("a reader does not end the exit barrier", SUCCEEDED, Continue(), policy=READER, after=99),
        case("the end of the exit barrier is requested", [*SUCCEEDED, BARRIER], Continue(), after=99),
        case("not all ranks have started", [update(0, "running", rank(0, 0), expected=2)], Continue(), after=99),
        case("a node has not reported yet", SUCCEEDED[:1], Continue(), after=99),
    ],
)  # fmt: skip
def test_decide(events: Sequence[Event], policy: Policy, after: float, action: Action) -> None:
    start = 1000.0
    assert decide(followed(events, at=start), policy, start + after) == action


FAILED_AGAIN = StopEnded(NONE, NONE, frozenset({1}))


@pytest.mark.parametrize(
    ("reply", "later", "action"),
    [
        pytest.param(STOPPED, [LogData(1, 1, b"x")], Continue(), id="logs still arrive"),
        pytest.param(STOPPED, [LogData(1, 1, b"")], Done(), id="empty logs arrive"),
        pytest.param(STOPPED, [update(1, "running", rank(1))], Done(), id="states arrive"),
        pytest.param(STOPPED, [NodeFinished(0)], Continue(), id="another node has just finished"),
        pytest.param(STOPPED, [NodeQuiet(1), NodeResponding(1)], Continue(), id="the node has just come back"),
        pytest.param(STOPPED_0, [FAILED_AGAIN], Done(), id="the repeated stop fails"),
        pytest.param(STOPPED_0, [LogData(1, 1, b"x"), FAILED_AGAIN], Done(), id="the repeated stop fails, logs arrive"),
        pytest.param(STOPPED_0, [StopEnded(frozenset({1}), NONE, NONE)], Continue(), id="the repeated stop succeeds"),
    ],
)  # fmt: skip
def test_end_of_a_stopped_job_is_awaited_while_there_is_progress(
    reply: StopEnded, later: Sequence[Event], action: Action
) -> None:
    """The later events come 99 s after the reply, and the decision is made 1 s after them."""
    state = followed([*FAILED, STOP, reply], at=1000.0)
    for event in later:
        state = state.apply(event, 1099.0)
    assert decide(state, OWNER, 1100.0) == action
