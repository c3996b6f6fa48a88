"""How long a cluster may live, and what it costs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cloudddp.cluster import prices
from cloudddp.cluster.plan import lifetime
from cloudddp.cluster.prices import Price
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError
from cloudddp.tags import iso, parse_time

NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)
DOLLAR = Price(node_hour=1.0, nodes=2, disk_gb=0, source="given")


# -- the deadline --------------------------------------------------------------------------------------------


def test_max_cost_never_extends_max_hours() -> None:
    assert lifetime(ClusterSpec(max_hours=1.0, max_cost=1e6), DOLLAR) == timedelta(hours=1)


@pytest.mark.parametrize("spec", [ClusterSpec(max_hours=0.16), ClusterSpec(max_cost=0.3)])
def test_lifetime_too_short_to_boot_is_refused(spec: ClusterSpec) -> None:
    with pytest.raises(UsageError, match="minutes after its start"):
        lifetime(spec, DOLLAR)


@pytest.mark.parametrize("node_hour", [1.0, 0.526, 1.006, 21.958, 0.0131, 113.933])
def test_suggested_max_cost_is_sufficient(node_hour: float) -> None:
    price = Price(node_hour=node_hour, nodes=2, disk_gb=150, source="given")
    with pytest.raises(UsageError) as caught:
        lifetime(ClusterSpec(max_cost=price.hour / 10), price)
    advised = float(str(caught.value.hint).split("$")[1].split()[0])
    assert lifetime(ClusterSpec(max_cost=advised, max_hours=0.17), price) >= timedelta(minutes=10)
    assert advised - 0.01 <= price.hour / 6  # and not a cent more


def test_refused_lifetime_is_reported_in_minutes() -> None:
    with pytest.raises(UsageError, match=r"would terminate 9\.6 minutes after its start: .* \$2\.01 an hour"):
        lifetime(ClusterSpec(max_hours=0.16), DOLLAR)


def test_times_round_trip_through_tags() -> None:
    assert parse_time(iso(NOW)) == NOW.replace(microsecond=0)
    assert iso(NOW.astimezone(timezone(timedelta(hours=5)))) == iso(NOW)


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01T00:00:00Z"])
def test_invalid_time_parses_to_none(text: str) -> None:
    assert parse_time(text) is None


# -- the price -----------------------------------------------------------------------------------------------


def test_price_is_that_of_its_region_and_has_a_date() -> None:
    found = prices.listed("g5.xlarge", "us-east-1")
    assert found is not None
    assert (found.usd, found.source) == (1.006, "on-demand list price of 2026-07-20")
    other = prices.listed("g5.xlarge", "eu-west-1")
    assert other is not None
    assert (other.usd, other.source) == (1.123, "on-demand list price of 2026-01-21")
    assert prices.listed("g5.nonsense", "us-east-1") is None
    assert prices.listed("g5.xlarge", "mars-north-1") is None


def test_disk_price_of_an_unknown_region_is_the_highest_of_all() -> None:
    assert prices.gp3_month("us-east-1") == 0.08
    assert prices.gp3_month("mars-north-1") == prices.gp3_month("sa-east-1") == 0.152


def test_throughput_beyond_what_is_free_is_counted() -> None:
    """EBS gp3 includes 125 MiB/s; more costs 0.04 USD per MiB/s and month in us-east-1."""
    price = Price(node_hour=1.0, nodes=2, disk_gb=150, source="given", throughput=500, addresses=0)
    assert price.extras_hour == pytest.approx(2 * (150 * 0.08 + 375 * 0.0408) / 730)


def test_iops_beyond_what_is_free_are_counted() -> None:
    """More than 750 MiB/s need more than the 3,000 IOPS that gp3 includes; each costs 0.005 USD a month in
    us-east-1."""
    price = Price(node_hour=1.0, nodes=1, disk_gb=150, source="given", throughput=1000, addresses=0)
    assert price.extras_hour == pytest.approx((150 * 0.08 + 875 * 0.0408 + 1000 * 0.005) / 730)


def test_hourly_price_includes_disks_and_addresses() -> None:
    price = Price(node_hour=2.0, nodes=3, disk_gb=730, source="given")
    assert price.extras_hour == pytest.approx(3 * (0.08 + 0.005))
    assert price.hour == pytest.approx(6.0 + 3 * 0.085)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(90, timedelta(minutes=90)), (60 * 9, timedelta(hours=8)), (10, timedelta(minutes=10))],
)
def test_capacity_block_ends_a_cluster_earlier_and_never_later(minutes: int, expected: timedelta) -> None:
    assert lifetime(ClusterSpec(max_hours=8.0), DOLLAR, NOW, NOW + timedelta(minutes=minutes)) == expected


def test_capacity_block_that_ends_before_the_nodes_have_booted_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"ends too soon: its nodes have to terminate by 2026-11-20 12:09 UTC"
    ):
        lifetime(ClusterSpec(), DOLLAR, NOW, NOW + timedelta(minutes=9))
