"""The cost of a cluster so far: it never falls, and includes nodes that have ended. test_down.py has the
command."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instances import inventory_instance

from cloudddp.aws.inventory import Instance
from cloudddp.cluster.prices import Cost, cost_so_far, total_cost
from cloudddp.tags import Tags

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def member(
    number: int = 0,
    *,
    state: str = "running",
    ended: datetime | None = None,
    nodes: int | None = 2,
    price: float | None = 1.0,
    created: datetime | None = START,
    launched: datetime | None = START,
) -> Instance:
    return inventory_instance(
        f"i-{number}",
        Tags("demo", "c-0123456789", "me", created, nodes=nodes, price=price),
        state=state,
        launch_index=number,
        launched=launched,
        ended=ended,
    )


def test_live_nodes_count_until_now() -> None:
    assert cost_so_far([member(0), member(1)], START + 2 * HOUR) == Cost(4.0)


def test_ended_node_counts_until_its_end() -> None:
    found = cost_so_far([member(0), member(1, state="terminated", ended=START + HOUR)], START + 3 * HOUR)
    assert found.usd == pytest.approx(4.0, abs=0.001)
    assert not found.at_most


def test_node_with_unknown_end_counts_until_now() -> None:
    assert cost_so_far([member(0), member(1, state="terminated")], START + 3 * HOUR) == Cost(
        6.0, at_most=True
    )


def test_node_forgotten_by_aws_still_counts() -> None:
    assert cost_so_far([member(0, nodes=3)], START + 2 * HOUR) == Cost(6.0, at_most=True)


@pytest.mark.parametrize(("listed", "usd"), [(True, 11.5), (False, 12.0)])
def test_replaced_node_is_not_counted_twice(listed: bool, usd: float) -> None:
    """`resume` copies the tags of `up`. Node 1 ended after 5 hours; another began half an hour later."""
    lost = member(1, state="terminated", ended=START + 5 * HOUR)
    lost, new = (
        replace(one, tags=replace(one.tags, node_rank=1))
        for one in (lost, member(2, launched=START + 5.5 * HOUR))
    )
    found = cost_so_far([member(0), *([lost] if listed else []), new], START + 6 * HOUR)
    assert found.usd == pytest.approx(usd, abs=0.001)


def test_unknown_price_or_start_is_unknown_cost() -> None:
    assert cost_so_far([member(price=None)], START + HOUR) == Cost(None)
    assert cost_so_far([member(created=None, launched=None)], START + HOUR) == Cost(None)
    assert total_cost([Cost(1.0), Cost(None)]) == Cost(None)
    assert total_cost([Cost(1.0), Cost(2.0, at_most=True)]) == Cost(3.0, at_most=True)
    assert total_cost([]) == Cost(0)


def test_one_changed_tag_does_not_change_the_cost() -> None:
    three = [member(0, nodes=3), member(1, nodes=3, price=None), member(2, nodes=9999, price=99999.0)]
    assert cost_so_far([*three, member(3, nodes=3)], START + HOUR) == Cost(4.0)


def test_node_without_tag_counts_from_its_launch() -> None:
    assert cost_so_far([member(created=None, nodes=1)], START + HOUR) == Cost(1.0)


SECONDS = st.integers(0, 20 * 3600)


@given(st.lists(st.tuples(SECONDS, st.booleans(), SECONDS), min_size=1, max_size=6), SECONDS, SECONDS)
def test_cost_never_falls(lives: list[tuple[int, bool, int]], first: int, second: int) -> None:
    """`lives`, per node: when it ends, whether AWS gives that time, and when AWS forgets it afterwards."""

    def shown(at: int) -> list[Instance]:
        found = [member(99, nodes=len(lives) + 1)]
        for number, (ends, known, kept) in enumerate(lives):
            if at < ends:
                found.append(member(number, nodes=len(lives) + 1))
            elif at < ends + kept:
                when = START + timedelta(seconds=ends) if known else None
                found.append(member(number, state="terminated", ended=when, nodes=len(lives) + 1))
        return found

    early, late = sorted((first, second))
    before = cost_so_far(shown(early), START + timedelta(seconds=early)).usd
    after = cost_so_far(shown(late), START + timedelta(seconds=late)).usd
    assert before is not None
    assert after is not None
    assert after >= before - 1e-9
