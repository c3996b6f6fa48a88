"""When nodes end: in words, after `extend`, past their deadline, and as AWS reports."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.instances import inventory_instance

from cloudddp.cli.actions.extend import parse_until
from cloudddp.cluster import lookup
from cloudddp.cluster.extend import LONGEST, Limits, new_deadline
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import NodesEnd, deadline, ends_at
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.local_state import MOVED, MOVING, ClusterFolder, ClusterRecord
from cloudddp.tags import Tags, iso


def cluster(late: float, *states: str) -> Cluster:
    """A cluster whose deadline passed so many seconds ago."""
    now = datetime.now(UTC)
    ids = {"name": "c", "cluster_id": "c-0123456789"}
    times = {"created": now - timedelta(days=1), "expires": now - timedelta(seconds=late)}
    tags = Tags("c", ids["cluster_id"], nodes=len(states), **times)
    nodes = [
        inventory_instance(f"i-{at}", tags, state=state, launch_index=at) for at, state in enumerate(states)
    ]
    return Cluster.of(nodes, **ids, region="us-east-1")


@pytest.mark.parametrize(
    ("late", "states", "named"),
    [
        (-60, ("running",), ""),
        (200, ("running", "running"), ""),  # it may still be powering off
        (3660, ("running", "running"), "i-0, i-1 should have terminated 61 min ago and are still running"),
        (3660, ("shutting-down", "running"), "i-1 should have terminated 61 min ago and is still running"),
        (3660, ("stopped",), ""),  # its timer fires when it is started
        (3660, ("terminated",), ""),
    ],
)  # fmt: skip
def test_nodes_that_run_after_their_deadline_are_named(
    late: float, states: tuple[str, ...], named: str
) -> None:
    found = cluster(late, *states)
    warnings = [warning for warning in found.warnings if "should have terminated" in warning]
    assert len(warnings) == bool(named)
    assert all(warning.startswith(named) for warning in warnings)
    assert ("overdue 1 h" in found.time_left) == bool(named)


# -- instances that have ended, as AWS reports ---------------------------------------------------------------


NODE = inventory_instance("i-a", Tags(cluster="demo", cluster_id="c-0123456789", nodes=1), state="running")
CLUSTER = Cluster.of([NODE], name="demo", cluster_id="c-0123456789", region="us-east-1")


@pytest.mark.parametrize(
    ("state", "report", "more"),
    [
        ("pending", "", {}),  # it has not ended
        ("running", "", {}),
        ("stopping", "stopping (retired)", {"stopped": True}),  # its disk is kept
        ("stopped", "stopped (retired)", {"stopped": True}),
        ("shutting-down", "shutting-down: retired", {"gone": False}),  # it may still answer
        ("terminated", "terminated: retired", {}),
    ],
)
def test_node_has_ended(state: str, report: str, more: dict[str, bool]) -> None:
    ended = lookup.ended_node(CLUSTER, 0, {"i-a": replace(NODE, state=state, reason="retired")})
    assert ended == (lookup.EndedNode(f"that i-a is {report}", **more) if report else None)
    unlisted = lookup.ended_node(CLUSTER, 0, {})
    assert unlisted is not None
    assert unlisted.gone, "it cannot answer"


# -- the new deadline that `extend` computes, and its limits -------------------------------------------------


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


def test_longest_life_is_that_of_max_hours() -> None:
    """And max_cost of the configuration allows an earlier deadline and a new limit."""
    limits = replace(LIMITS, max_cost=1.0)
    assert new_deadline(limits, until=NOW + HOUR)
    assert new_deadline(limits, usd=18)
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


# -- in words (cluster/nodes_end.py) -------------------------------------------------------------------------


SECONDS = 3600.0  # of an hour
DAY = 24 * SECONDS
WHY, AT_DEADLINE = "--keep of job J", "the nodes end at DEADLINE (their deadline)"


@pytest.mark.parametrize(
    ("deadline", "grace", "used", "ends"),
    [
        (None, None, 0.0, None),
        (8 * SECONDS, None, 0.0, 8 * SECONDS),
        (8 * SECONDS, SECONDS, 0.0, SECONDS),
        (8 * SECONDS, SECONDS, -0.5 * SECONDS, 0.5 * SECONDS),
        (8 * SECONDS, SECONDS, -2 * SECONDS, -SECONDS),  # it should have ended
        (8 * SECONDS, SECONDS, DAY, SECONDS),  # a clock is a day ahead
        (8 * SECONDS, 10 * SECONDS, 0.0, 8 * SECONDS),  # --keep is longer than what is left
        (-SECONDS, SECONDS, 0.0, -SECONDS),
        (None, 0.0, 0.0, 0.0),
    ],
)
def test_earlier_of_deadline_and_grace(
    deadline: float | None, grace: float | None, used: float, ends: float | None
) -> None:
    assert ends_at(deadline, grace, used, now=0.0) == ends


@pytest.mark.parametrize(
    ("hours", "grace", "used", "text"),
    [
        (8, None, None, "the nodes end at DEADLINE, their deadline: "),
        (8, SECONDS, None, f"{AT_DEADLINE}, or once unused for 1 h 00 min ({WHY}): "),
        (8, 0.0, None, f"{AT_DEADLINE}, or as soon as they are unused ({WHY}): "),
        (
            1,
            8 * SECONDS,
            None,
            f"DEADLINE, their deadline, which comes before 8 h 00 min without a use ({WHY}): ",
        ),
        (8, SECONDS, 1800.5, f"UTC, unless they are used until then: {WHY}; "),
        (8, SECONDS, 2 * SECONDS, f"UTC ({WHY}) and still run: "),
        (None, None, None, "the nodes have no deadline: "),
        (None, SECONDS, None, f"the nodes end once unused for 1 h 00 min ({WHY}): "),
    ],
)
def test_sentence_has_when_why_and_the_command(
    hours: float | None, grace: float | None, used: float | None, text: str
) -> None:
    now = datetime.now(UTC)
    deadline = now + timedelta(hours=hours) if hours else None
    last = None if used is None else now.timestamp() - used
    found = NodesEnd(deadline, grace, WHY if grace is not None else "", last).sentence
    assert text.replace("DEADLINE", f"{deadline:%Y-%m-%d %H:%M} UTC" if deadline else "") in found
    assert found.endswith("`cloudddp down` ends them now")
