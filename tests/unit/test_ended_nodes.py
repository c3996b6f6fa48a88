"""Nodes whose instances have ended, as AWS reports: which of them cannot answer any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.instances import inventory_instance

from cloudddp.cluster import lookup
from cloudddp.cluster.model import Cluster
from cloudddp.tags import Tags

NODE = inventory_instance("i-a", Tags(cluster="demo", cluster_id="c-0123456789", nodes=1), state="running")
CLUSTER = Cluster.of([NODE], name="demo", cluster_id="c-0123456789", region="us-east-1")


@pytest.mark.parametrize("state", ["pending", "running"])
def test_node_has_not_ended(state: str) -> None:
    assert lookup.ended_node(CLUSTER, 0, {"i-a": replace(NODE, state=state)}) is None


@pytest.mark.parametrize("state", ["stopping", "stopped"])
def test_disk_of_a_stopped_node_is_kept(state: str) -> None:
    ended = lookup.ended_node(CLUSTER, 0, {"i-a": replace(NODE, state=state, reason="retired")})
    assert ended == lookup.EndedNode(f"that i-a is {state} (retired)", stopped=True)


def test_node_that_shuts_down_may_still_answer() -> None:
    ended = lookup.ended_node(CLUSTER, 0, {"i-a": replace(NODE, state="shutting-down")})
    assert ended is not None
    assert not ended.gone


@pytest.mark.parametrize("now", [{"i-a": replace(NODE, state="terminated")}, {}])
def test_terminated_node_cannot_answer(now: dict[str, lookup.Instance]) -> None:
    ended = lookup.ended_node(CLUSTER, 0, now)
    assert ended is not None
    assert ended.gone
