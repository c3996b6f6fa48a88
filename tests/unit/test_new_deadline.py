"""The new deadline that `extend` computes, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.instances import inventory_instance

from cloudddp.cli.actions.extend import parse_until
from cloudddp.cluster.extend import LONGEST, Limits, deadline, new_deadline
from cloudddp.cluster.model import Cluster
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.local_state import MOVED, MOVING, ClusterFolder, ClusterRecord
from cloudddp.tags import Tags, iso

NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)
HOUR = timedelta(hours=1)
LIMITS = Limits(NOW, NOW + 2 * HOUR, NOW + 300 * HOUR, so_far=8.0, hour=2.0)


@pytest.mark.parametrize(
    ("wanted", "hours"),
    [
        ({"hours": 3}, 5),  # more than the present deadline, not than now
        ({"hours": 0.5}, 2.5),
        ({"until": NOW + HOUR}, 1),  # earlier
        ({"until": datetime.fromisoformat("2026-11-20T20:00+05:00")}, 3),
        ({"usd": 18}, 5),  # 8 so far, and 5 hours at 2
        ({"usd": 9}, 0.5),
    ],
)
def test_new_deadline(wanted: dict[str, Any], hours: float) -> None:
    assert new_deadline(LIMITS, **wanted) == (NOW + hours * HOUR).replace(microsecond=0)


@pytest.mark.parametrize(
    ("wanted", "limits", "words"),
    [
        ({"until": NOW - HOUR}, LIMITS, "in the past"),
        ({"until": NOW + timedelta(seconds=30)}, LIMITS, "less than a minute ahead"),
        ({"usd": 7}, LIMITS, "cost so far: \\$8.00"),
        ({"hours": 299}, LIMITS, "336 hours after it was created"),
        ({"usd": 1e9}, LIMITS, "336 hours after it was created"),
        ({"usd": 9}, replace(LIMITS, so_far=None), "price of this cluster is unknown"),
        ({"usd": 9}, replace(LIMITS, hour=None), "price of this cluster is unknown"),
        ({"hours": 3}, replace(LIMITS, max_cost=17), "would be \\$18.00, and cluster.max_cost is 17"),
        ({"hours": 3}, replace(LIMITS, max_cost=17, hour=None), "price unknown"),
        ({"hours": 3}, replace(LIMITS, last=NOW + 4 * HOUR), "capacity block"),
    ],
)
def test_refused(wanted: dict[str, Any], limits: Limits, words: str) -> None:
    with pytest.raises(CloudDDPError, match=words):
        new_deadline(limits, **wanted)


def test_max_cost_of_the_configuration_allows_an_earlier_deadline_and_a_new_limit() -> None:
    limits = replace(LIMITS, max_cost=1.0)
    assert new_deadline(limits, until=NOW + HOUR)
    assert new_deadline(limits, usd=18)


def test_longest_life_is_that_of_max_hours() -> None:
    hours = LONGEST.total_seconds() / 3600
    assert settings.resolve([Layer("a test", {"cluster": {"max_hours": hours}})]).cluster.max_hours == 336
    with pytest.raises(UsageError):
        settings.resolve([Layer("a test", {"cluster": {"max_hours": hours + 1}})])


@pytest.mark.parametrize(
    ("extended", "seen", "hours"),
    [
        ("", 0, 2),  # as AWS lists it
        (MOVED, 0, 5),  # `extend` has moved it since
        (MOVING, 0, 5),
        (MOVED, math.inf, 2),  # before: another computer may have moved it again
    ],
)
def test_deadline_of_a_cluster_that_was_found_a_while_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extended: str, seen: float, hours: float
) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "home"))
    now = NOW.replace(microsecond=0)
    record = ClusterRecord("c-0123456789", "demo", "us-east-1", "", iso(now + 5 * HOUR), extended=extended)
    ClusterFolder(record.id).create(record, private_key="k", host_public="k")
    node = inventory_instance("i-1", Tags("demo", record.id, "me", now, now + 2 * HOUR))
    cluster = replace(Cluster.of([node], name="demo", cluster_id=record.id, region="r"), seen=seen)
    assert deadline(cluster) == now + hours * HOUR


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("18:00", datetime(2026, 11, 20, 18).astimezone()),  # of today, in local time
        ("2026-12-01T08:00", datetime(2026, 12, 1, 8).astimezone()),
        ("2026-12-01T08:00+05:00", datetime(2026, 12, 1, 3, tzinfo=UTC)),
    ],
)
def test_until(text: str, found: datetime) -> None:
    assert parse_until(text, datetime(2026, 11, 20, 12)) == found


@pytest.mark.parametrize(
    "text", ["", "25:00", "tomorrow", "nan", "2026-13-01", "0001-01-01", "9999-12-31T23:59-14:00"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--until"):
        parse_until(text, datetime(2026, 11, 20, 12))
