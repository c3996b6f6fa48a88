"""Nodes that outlive their deadline: a hung kernel does not power itself off, and AWS bills it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from support.instances import inventory_instance

from cloudddp.cluster.model import Cluster
from cloudddp.tags import Tags


def cluster(late: float, *states: str) -> Cluster:
    """A cluster whose deadline passed so many seconds ago."""
    now = datetime.now(UTC)
    tags = Tags(
        cluster="c",
        cluster_id="c-0123456789",
        nodes=len(states),
        created=now - timedelta(days=1),
        expires=now - timedelta(seconds=late),
    )
    nodes = [
        inventory_instance(f"i-{at}", tags, state=state, launch_index=at) for at, state in enumerate(states)
    ]
    return Cluster.of(nodes, name="c", cluster_id="c-0123456789", region="us-east-1")


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
