"""How long a cluster may live, what it costs, what `cost` says of those that are gone, and regions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from support.instances import inventory_instance

from cloudddp.aws import client
from cloudddp.cli.views.costs import costs_text
from cloudddp.cluster import prices
from cloudddp.cluster.costs import ClusterCost, collect
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import lifetime
from cloudddp.cluster.prices import Cost, Price
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import UsageError
from cloudddp.formats import region_list
from cloudddp.local_state import ClusterFolder, ClusterRecord, history
from cloudddp.tags import Tags, parse_time

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RECORD = ClusterRecord("c-0123456789", "demo", "us-east-1", "", "2026-11-20T20:00:00Z", project="digits")
RECORD = replace(RECORD, created="2026-11-20T12:00:00Z", nodes=2, node_hour=1.5)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: a record -> what `cost` finds at a moment."""
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "home"))

    def collected(
        record: ClusterRecord, *, hours: float, listed: tuple[Cluster, ...] = ()
    ) -> list[ClusterCost]:
        folder = ClusterFolder(record.id)
        folder.create(record, private_key="k", host_public="k")
        folder.journal_created(["i-1"])
        return collect(history(""), listed, START + hours * HOUR)

    return collected


@pytest.mark.parametrize(
    ("record", "hours", "cost", "running"),
    [
        (RECORD, 2, Cost(6.0, at_most=True), True),
        (RECORD, 100, Cost(24.25, at_most=True), False),  # until its deadline, and 5 minutes to power off
        (replace(RECORD, usd=7.5), 100, Cost(7.5), False),
        (replace(RECORD, usd=7.5, usd_is_at_most=True), 2, Cost(7.5, at_most=True), False),
        (replace(RECORD, node_hour=None), 100, Cost(None), False),
    ],
)
def test_cost_of_a_cluster_that_aws_does_not_list(
    found: Any, record: ClusterRecord, hours: float, cost: Cost, running: bool
) -> None:
    (one,) = found(record, hours=hours)
    assert (one.usd, one.usd_is_at_most, one.running) == (cost.usd, cost.at_most, running)
    assert (one.project, one.month) == ("digits", "2026-11")
    if cost.usd is None:
        assert costs_text([one]).count("unknown") == 3, "the cluster, its month, the total"


@pytest.mark.usefixtures("found")
def test_cluster_without_nodes_is_left_out() -> None:
    """Its journal is absent, or unreadable."""
    folder = ClusterFolder(RECORD.id)
    folder.create(RECORD, private_key="k", host_public="k")
    assert history("") == []
    (folder.path / "journal.jsonl").mkdir()
    assert history("") == []


def test_damaged_record_is_an_unknown_cost_and_does_not_hide_the_others(found: Any) -> None:
    folder = ClusterFolder("c-9999999999")
    folder.create(replace(RECORD, id="c-9999999999", usd=-5.0), private_key="k", host_public="k")
    folder.journal_created(["i-2"])
    shown = [(one.cluster_id, one.usd) for one in found(RECORD, hours=2)]
    assert shown == [(folder.id, None), (RECORD.id, 6.0)]


def test_what_aws_lists_comes_first(found: Any) -> None:
    """Also clusters of the caller that another computer has created."""
    tags = Tags("demo", "c-0123456789", "me", START, START + 8 * HOUR, nodes=1, price=1.0)
    other = replace(tags, cluster="other", cluster_id="c-9876543210")
    listed = tuple(
        Cluster.of([inventory_instance("i-1", one)], name=one.cluster, cluster_id=one.cluster_id, region="r")
        for one in (tags, other)
    )
    shown = [(one.project, one.usd, one.running) for one in found(RECORD, hours=3, listed=listed)]
    assert shown == [("digits", 3.0, True), ("other", 3.0, True)]


def test_sums_by_month_and_project() -> None:
    def one(project: str, month: int, cost: Cost) -> ClusterCost:
        start = f"2026-{month}-20T12:00"
        return ClusterCost(
            *("demo", "c-0123456789", "r", project, start[:7], start, False), cost.usd, cost.at_most
        )

    text = costs_text(
        [one("a", 10, Cost(1)), one("a", 11, Cost(2)), one("b", 11, Cost(4, True)), one("a", 11, Cost(None))]
    )
    _, sums = text.split("\n\n")
    assert [line.split(maxsplit=3) for line in sums.splitlines()[1:4]] == [
        ["2026-10", "a", "1", "$1.00"],
        ["2026-11", "a", "2", "$2.00 and 1 unknown"],
        ["2026-11", "b", "1", "at most $4.00"],
    ]
    assert sums.splitlines()[4].split(maxsplit=2) == ["total", "4", "at most $7.00 and 1 unknown"]


NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)
DOLLAR = Price(node_hour=1.0, nodes=2, disk_gb=0, source="given")


@pytest.mark.parametrize(
    ("spec", "minutes"), [(ClusterSpec(max_hours=0.16), "9.6"), (ClusterSpec(max_cost=0.3), "8.9")]
)
def test_lifetime_too_short_to_boot_is_refused(spec: ClusterSpec, minutes: str) -> None:
    expected = rf"would terminate {minutes} minutes after its start: .* \$2\.01 an hour"
    with pytest.raises(UsageError, match=expected):
        lifetime(spec, DOLLAR)
    assert lifetime(ClusterSpec(max_hours=1.0, max_cost=1e6), DOLLAR) == timedelta(hours=1)


@pytest.mark.parametrize("node_hour", [1.0, 0.526, 1.006, 21.958, 0.0131, 113.933])
def test_suggested_max_cost_is_sufficient(node_hour: float) -> None:
    price = Price(node_hour=node_hour, nodes=2, disk_gb=150, source="given")
    with pytest.raises(UsageError) as caught:
        lifetime(ClusterSpec(max_cost=price.hour / 10), price)
    advised = float(str(caught.value.hint).split("$")[1].split()[0])
    assert lifetime(ClusterSpec(max_cost=advised, max_hours=0.17), price) >= timedelta(minutes=10)
    assert advised - 0.01 <= price.hour / 6  # and not a cent more


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01T00:00:00Z"])
def test_invalid_time_parses_to_none(text: str) -> None:
    assert parse_time(text) is None


def test_price_is_that_of_its_region_and_has_a_date() -> None:
    for region, usd, date in (("us-east-1", 1.006, "2026-07-20"), ("eu-west-1", 1.123, "2026-01-21")):
        found = prices.listed("g5.xlarge", region)
        assert found is not None
        assert (found.usd, found.source) == (usd, f"on-demand list price of {date}")
    assert prices.listed("g5.nonsense", "us-east-1") is None
    assert prices.listed("g5.xlarge", "mars-north-1") is None


def test_disk_price_of_an_unknown_region_is_the_highest_of_all() -> None:
    assert prices.gp3_month("us-east-1") == 0.08
    assert prices.gp3_month("mars-north-1") == prices.gp3_month("sa-east-1") == 0.152


@pytest.mark.parametrize(("throughput", "paid", "iops"), [(500, 375, 0), (1000, 875, 1000)])
def test_throughput_and_iops_beyond_what_is_free_are_counted(throughput: int, paid: int, iops: int) -> None:
    """EBS gp3 includes 125 MiB/s and 3,000 IOPS, which more than 750 MiB/s exceed; more costs 0.04 USD per
    MiB/s and 0.005 USD for each, a month, in us-east-1."""
    price = Price(node_hour=1.0, nodes=2, disk_gb=150, source="given", throughput=throughput, addresses=0)
    assert price.extras_hour == pytest.approx(2 * (150 * 0.08 + paid * 0.0408 + iops * 0.005) / 730)


def test_hourly_price_includes_disks_and_addresses() -> None:
    price = Price(node_hour=2.0, nodes=3, disk_gb=730, source="given")
    assert price.extras_hour == pytest.approx(3 * (0.08 + 0.005))
    assert price.hour == pytest.approx(6.0 + 3 * 0.085)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(90, timedelta(minutes=90)), (60 * 9, timedelta(hours=8)), (10, timedelta(minutes=10))],
)
def test_capacity_block_ends_a_cluster_earlier_and_never_later(minutes: int, expected: timedelta) -> None:
    """One that ends before the nodes have booted is refused."""
    assert lifetime(ClusterSpec(max_hours=8.0), DOLLAR, NOW, NOW + timedelta(minutes=minutes)) == expected
    with pytest.raises(
        UsageError, match="ends too soon: its nodes have to terminate by 2026-11-20 12:09 UTC"
    ):
        lifetime(ClusterSpec(), DOLLAR, NOW, NOW + timedelta(minutes=9))


def test_regions_are_those_of_botocore() -> None:
    session = botocore.session.Session()
    partitions = session.get_available_partitions()
    theirs = [one for name in partitions for one in session.get_available_regions("ec2", partition_name=name)]
    assert sorted(client.regions(session)) == sorted(theirs)
    assert {"us-east-1", "cn-north-1", "us-gov-west-1"} <= set(theirs)


def test_many_regions_are_counted() -> None:
    for names, shown in (
        ("a", "a"),
        ("abcd", "a, b, c, d"),
        ("abcde", "a, b, c and 2 other regions"),
        ("", ""),
    ):
        assert region_list(names) == shown
