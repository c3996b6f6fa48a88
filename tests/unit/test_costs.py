"""What `cost` says of clusters that are gone, from the records of this computer."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.instances import inventory_instance

from cloudddp.cli.views.costs import costs_text
from cloudddp.cluster.costs import ClusterCost, collect
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.prices import Cost
from cloudddp.local_state import ClusterFolder, ClusterRecord, history
from cloudddp.tags import Tags

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RECORD = ClusterRecord(
    "c-0123456789",
    "demo",
    "us-east-1",
    "",
    "2026-11-20T20:00:00Z",
    project="digits",
    created="2026-11-20T12:00:00Z",
    nodes=2,
    node_hour=1.5,
)


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


def test_unknown_price_is_unknown_and_not_0(found: Any) -> None:
    (one,) = found(replace(RECORD, node_hour=None), hours=100)
    assert costs_text([one]).count("unknown") == 3  # the cluster, its month, the total
    assert one.usd is None


@pytest.mark.parametrize("journal", ["absent", "unreadable"])
def test_cluster_without_nodes_is_left_out(found: Any, journal: str) -> None:
    folder = ClusterFolder(RECORD.id)
    folder.create(RECORD, private_key="k", host_public="k")
    if journal == "unreadable":
        (folder.path / "journal.jsonl").mkdir()
    assert history("") == []


def test_damaged_record_is_an_unknown_cost_and_does_not_hide_the_others(found: Any) -> None:
    folder = ClusterFolder("c-9999999999")
    folder.create(replace(RECORD, id="c-9999999999", usd=-5.0), private_key="k", host_public="k")
    folder.journal_created(["i-2"])
    assert [(one.cluster_id, one.usd) for one in found(RECORD, hours=2)] == [
        (folder.id, None),
        (RECORD.id, 6.0),
    ]


def test_record_of_an_earlier_version_has_the_name_for_the_project(found: Any) -> None:
    (one,) = found(ClusterRecord("c-0123456789", "demo", "us-east-1", "", "2026-11-20T20:00:00Z"), hours=100)
    assert (one.project, one.usd, one.month) == ("demo", None, None)


def test_what_aws_lists_comes_first(found: Any) -> None:
    """Also clusters of the caller that another computer has created."""
    tags = Tags("demo", "c-0123456789", "me", START, START + 8 * HOUR, nodes=1, price=1.0)
    other = replace(tags, cluster="other", cluster_id="c-9876543210")
    listed = tuple(
        Cluster.of([inventory_instance("i-1", one)], name=one.cluster, cluster_id=one.cluster_id, region="r")
        for one in (tags, other)
    )
    shown = found(RECORD, hours=3, listed=listed)
    assert [(one.project, one.usd, one.running) for one in shown] == [
        ("digits", 3.0, True),
        ("other", 3.0, True),
    ]


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
