"""The new deadline that `extend` computes, and its limits."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cloudddp.cli.actions.extend import parse_until
from cloudddp.cluster.extend import LONGEST, Limits, new_deadline
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.errors import CloudDDPError, UsageError

NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)
HOUR = timedelta(hours=1)
LIMITS = Limits(NOW, NOW + 2 * HOUR, NOW - 4 * HOUR, so_far=8.0, hour=2.0)


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
        ({"usd": 7}, LIMITS, "has cost \\$8.00 already"),
        ({"hours": 331}, LIMITS, "336 hours after it was created"),
        ({"usd": 1e9}, LIMITS, "336 hours after it was created"),
        ({"usd": 9}, replace(LIMITS, so_far=None), "price of this cluster is unknown"),
        ({"usd": 9}, replace(LIMITS, hour=None), "price of this cluster is unknown"),
        ({"hours": 1}, replace(LIMITS, present=None), "present deadline is unknown"),
        ({"hours": 3}, replace(LIMITS, max_cost=17), "up to \\$18.00, and cluster.max_cost is 17"),
        ({"hours": 3}, replace(LIMITS, max_cost=17, hour=None), "unknown amount"),
        ({"hours": 3}, replace(LIMITS, latest=NOW + 4 * HOUR), "capacity block"),
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
    ("text", "at", "found"),
    [
        ("18:00", 12, "2026-11-20 18:00"),
        ("9:30", 22, "2026-11-21 09:30"),  # has passed, and the next one is soon
        ("2026-12-01T08:00", 12, "2026-12-01 08:00"),
    ],
)
def test_time_without_a_zone_is_local(text: str, at: int, found: str) -> None:
    now = datetime(2026, 11, 20, at).astimezone()
    assert f"{parse_until(text, now):%Y-%m-%d %H:%M}" == found


def test_zone_is_kept() -> None:
    now = datetime(2026, 11, 20, 12).astimezone()
    assert parse_until("2026-12-01T08:00Z", now) == datetime(2026, 12, 1, 8, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "25:00", "tomorrow", "nan", "2026-13-01", "18", "11:00"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--until"):
        parse_until(text, datetime(2026, 11, 20, 12).astimezone())
