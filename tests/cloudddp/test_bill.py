"""What a cluster has cost so far: a sum that only rises, and that counts nodes which are gone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness import wait_for
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.aws.inventory import Instance
from cloudddp.bill import Bill, so_far, total
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
    return Instance(
        id=f"i-{number}",
        state=state,
        reason="",
        reason_code="",
        type="g5.xlarge",
        zone="",
        image="",
        key_name="",
        spot=False,
        private_ip="",
        public_ip="",
        launched=launched,
        ended=ended,
        tags=Tags("demo", "c-0123456789", "me", created, None, None, nodes, price),
    )


def test_live_nodes_are_counted_until_now() -> None:
    assert so_far([member(0), member(1)], START + 2 * HOUR) == Bill(4.0)


def test_a_lost_node_is_counted_until_it_ended() -> None:
    found = so_far([member(0), member(1, state="terminated", ended=START + HOUR)], START + 3 * HOUR)
    assert found.usd == pytest.approx(4.0, abs=0.001)
    assert not found.at_most


def test_a_lost_node_of_an_unknown_end_is_counted_until_now_which_is_said() -> None:
    assert so_far([member(0), member(1, state="terminated")], START + 3 * HOUR) == Bill(6.0, at_most=True)


def test_a_node_that_aws_has_forgotten_is_counted_too() -> None:
    assert so_far([member(0, nodes=3)], START + 2 * HOUR) == Bill(6.0, at_most=True)


def test_an_unknown_price_or_start_is_no_sum() -> None:
    assert so_far([member(price=None)], START + HOUR) == Bill(None)
    assert so_far([member(created=None, launched=None)], START + HOUR) == Bill(None)
    assert total([Bill(1.0), Bill(None)]) == Bill(None)
    assert total([Bill(1.0), Bill(2.0, at_most=True)]) == Bill(3.0, at_most=True)
    assert total([]) == Bill(0)


def test_one_changed_tag_does_not_change_the_price_or_the_number() -> None:
    three = [member(0, nodes=3), member(1, nodes=3, price=None), member(2, nodes=9999, price=99999.0)]
    three[0] = member(0, nodes=3)
    assert so_far([*three, member(3, nodes=3)], START + HOUR) == Bill(4.0)


def test_without_its_tag_a_node_counts_from_its_launch() -> None:
    assert so_far([member(created=None, nodes=1)], START + HOUR) == Bill(1.0)


SECONDS = st.integers(0, 20 * 3600)


@given(st.lists(st.tuples(SECONDS, st.booleans(), SECONDS), min_size=1, max_size=6), SECONDS, SECONDS)
def test_it_only_rises_whatever_is_lost_and_forgotten(
    lives: list[tuple[int, bool, int]], first: int, second: int
) -> None:
    """Of each node: when it ends, whether AWS says so, and after how long AWS forgets it."""

    def shown(at: int) -> list[Instance]:
        found = [member(99, nodes=len(lives) + 1)]
        for number, (ends, told, kept) in enumerate(lives):
            if at < ends:
                found.append(member(number, nodes=len(lives) + 1))
            elif at < ends + kept:
                when = START + timedelta(seconds=ends) if told else None
                found.append(member(number, state="terminated", ended=when, nodes=len(lives) + 1))
        return found

    early, late = sorted((first, second))
    before = so_far(shown(early), START + timedelta(seconds=early)).usd
    after = so_far(shown(late), START + timedelta(seconds=late)).usd
    assert before is not None
    assert after is not None
    assert after >= before - 1e-9


# -- through the command line ----------------------------------------------------------------------------------


def test_status_and_down_count_a_node_that_was_lost(cli: Any, ec2: Any, remains: Any) -> None:
    """Seen in 0.1: $0.92 where about $1.28 was due."""
    cli.ok("up", "-n", "2")
    made = remains()
    early = datetime.now(UTC) - timedelta(hours=10)
    tags = [{"Key": "cloudddp:created", "Value": f"{early:%Y-%m-%dT%H:%M:%SZ}"}]
    ec2.create_tags(Resources=[*made.instances], Tags=tags)
    (before,) = json.loads(cli.ok("status", "--json"))
    assert before["usd_so_far"] == pytest.approx(20.55, abs=0.1)
    ec2.terminate_instances(InstanceIds=made.instances[:1])
    wait_for(lambda: len(remains().instances) == 1, "a node is lost")
    (after,) = json.loads(cli.ok("status", "--json"))
    assert len(after["nodes"]) == 1
    assert after["usd_so_far"] >= before["usd_so_far"]
    assert not after["usd_so_far_is_at_most"]
    bill = cli.ok("down", "-y")
    assert float(bill.split("$")[1].split()[0]) >= before["usd_so_far"] - 0.005


def test_status_after_down_does_not_show_the_cluster_that_ended(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    cli.ok("down", "-y")
    done = cli("status")
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"the last one, {cluster['cluster_id']}, ended on 20" in done.stderr
    as_json = cli("status", "--json")
    assert (as_json.returncode, json.loads(as_json.stdout)) == (1, [])
