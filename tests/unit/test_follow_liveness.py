"""When a node counts as quiet, as responding again and as lost, and when reconnecting is given up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from support.jobstates import followed

from cloudddp.config.timing import Timing
from cloudddp.job.follow.decide import liveness_changes
from cloudddp.job.follow.events import Event, NodeFinished, NodeLost, NodeQuiet, NodeResponding
from cloudddp.job.follow.stream import Liveness

T = Timing()
WALL = 5000.0
OVERDUE = NodeLost(1, "no heartbeat for 120 s", WALL - 121)


def case(name: str, before: list[Event], silence: Mapping[int, float], *found: Event) -> Any:
    """A row: the events so far, for how long each node has been silent, and the resulting events."""
    return pytest.param(before, silence, list(found), id=name)


@pytest.mark.parametrize(
    ("before", "silence", "found"),
    [
        case("all respond", [], {0: 0.0, 1: 14.0}),
        case("one is quiet", [], {0: 0.0, 1: 16.0}, NodeQuiet(1)),
        case("all are quiet", [], {0: 16.0, 1: 16.0}, NodeQuiet(0), NodeQuiet(1)),
        case("one is still quiet", [NodeQuiet(1)], {0: 0.0, 1: 20.0}),
        case("one responds again", [NodeQuiet(1)], {0: 0.0, 1: 1.0}, NodeResponding(1)),
        case("one is overdue", [NodeQuiet(1)], {0: 0.0, 1: 121.0}, OVERDUE),
        case("all are overdue: offline", [NodeQuiet(0), NodeQuiet(1)], {0: 121.0, 1: 121.0}),
        case("one that has finished is not quiet", [NodeFinished(1)], {0: 0.0, 1: 99.0}),
        case(
            "one that has finished still answers",
            [NodeQuiet(1), NodeFinished(0)],
            {0: 9.0, 1: 121.0},
            OVERDUE,
        ),
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
        pytest.param([], 19.0, False, id="offline"),
        pytest.param([], 299.0, False, id="offline for minutes"),
        pytest.param([], 301.0, True, id="offline for too long"),
        pytest.param([100.0], 19.0, False, id="just broken"),
        pytest.param([100.0], 21.0, True, id="others answer"),
        pytest.param([5.0], 60.0, False, id="others have just come back"),
        pytest.param([5.0, 21.0], 60.0, True, id="another has been back for a while"),
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
