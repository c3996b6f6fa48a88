"""Resolves the name that a user gives a node: rank, instance id or address. Pure.

A rank is the number that every other command shows for the node: see `ranked`. The tags are read here, from
EC2's answers alone, and not with the product's own code: with shared code, tests would not detect its bugs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

CLUSTER_TAG = "cloudddp:cluster"
CLUSTER_ID_TAG = "cloudddp:cluster-id"
RANK_TAG = "cloudddp:node-rank"

Node = dict[str, Any]

_RANK = re.compile(r"[0-9]{1,4}")  # not \d or str.isdigit(), which accept digits of other scripts
_UNRANKED = 1 << 30  # sorts nodes without a rank last
_COUNTED = ("pending", "running", "stopping", "stopped")  # instance states that have a rank
_MAX_LISTED = 16  # nodes in an error message


class BadRequest(Exception):
    """A request that the admin API refuses."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def ranked(
    nodes: Sequence[Node], tags: Mapping[str, Mapping[str, str]], launches: Mapping[str, tuple[str, int]]
) -> list[Node]:
    """Return the nodes with `cluster` (a name, or None) and `rank` (or None), sorted by these.

    `nodes` are in the order of their launch; `tags` and `launches` (reservation id and launch index) are by
    instance id. The rank of a node is its tag, or its launch index in the first launch of its cluster, so it
    stays when another node ends. Nodes without a cluster have ranks if there is no cluster at all.
    """

    def own_tags(node: Node) -> Mapping[str, str]:
        return tags.get(node["instance_id"], {})

    def cluster_of(node: Node) -> tuple[str, str]:
        return own_tags(node).get(CLUSTER_TAG, ""), own_tags(node).get(CLUSTER_ID_TAG, "")

    def tagged_rank(node: Node) -> int | None:
        rank = own_tags(node).get(RANK_TAG, "")
        return int(rank) if _RANK.fullmatch(rank) else None

    first_launch: dict[tuple[str, str], str] = {}
    for node in nodes:
        if tagged_rank(node) is None:
            first_launch.setdefault(cluster_of(node), launches[node["instance_id"]][0])
    has_clusters = any(cluster_of(node)[0] for node in nodes)
    taken: set[tuple[tuple[str, str], int]] = set()
    found = []
    for position, node in enumerate(nodes):
        cluster, rank = cluster_of(node), tagged_rank(node)
        reservation, launch_index = launches[node["instance_id"]]
        if rank is None and not has_clusters:
            rank = position
        elif rank is None and cluster[0] and reservation == first_launch[cluster]:
            rank = launch_index
        if node["state"] not in _COUNTED or (cluster, rank) in taken:
            rank = None
        if rank is not None:
            taken.add((cluster, rank))
        found.append({**node, "cluster": cluster[0] or None, "rank": rank})
    return sorted(found, key=_by_cluster_and_rank)


def _by_cluster_and_rank(node: Node) -> tuple[str, int]:
    return node["cluster"] or "", _UNRANKED if node["rank"] is None else node["rank"]


def find(nodes: Sequence[Node], name: object, cluster: str | None) -> Node:
    """Return the node with that rank in `cluster` (or in the only one), instance id, prefix of one, or
    address.

    `nodes` are as `ranked` returns them. Raises BadRequest.
    """
    text = str(name)
    for node in nodes:
        if text in (node["instance_id"], node["private_ip"], node["public_ip"]):
            return node
    if text.isdecimal():
        return _find_by_rank(nodes, int(text), cluster)
    matches = [node for node in nodes if text.startswith("i-") and node["instance_id"].startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise BadRequest(f"several nodes match {text}: {listing(matches)}")
    raise BadRequest(f"no node {name!r}; nodes: {listing(nodes)}")


def _find_by_rank(nodes: Sequence[Node], rank: int, cluster: str | None) -> Node:
    clusters = list(dict.fromkeys(node["cluster"] for node in nodes if node["cluster"]))
    if cluster is not None and cluster not in clusters:
        raise BadRequest(
            f"no cluster {cluster!r} in the simulator; clusters: {', '.join(clusters) or 'none'}",
            "-c NAME selects another cluster; an instance id works without one",
        )
    if cluster is None and len(clusters) > 1:
        raise BadRequest(
            f"node {rank} of which cluster? clusters: {', '.join(clusters)}",
            f"for example -c {clusters[0]}, or the node's instance id (cloudddp sim status)",
        )
    selected = cluster or next(iter(clusters), None)
    members = [node for node in nodes if node["cluster"] == selected]
    matches = [node for node in members if node["rank"] == rank]
    if len(matches) == 1:
        return matches[0]
    where = f"cluster {selected!r}" if selected else "the simulator"
    if matches:
        raise BadRequest(f"several nodes are node {rank} of {where}: {listing(matches)}")
    raise BadRequest(f"no node {rank} in {where}; nodes: {listing(members)}")


def listing(nodes: Sequence[Node]) -> str:
    """Return the nodes as text: `0 (i-...), 1 (i-...)`, with their clusters if there are several."""
    with_cluster = len({node["cluster"] for node in nodes}) > 1
    names = [_display_name(node, with_cluster=with_cluster) for node in nodes[:_MAX_LISTED]]
    if len(nodes) > _MAX_LISTED:
        names.append(f"and {len(nodes) - _MAX_LISTED} more")
    return ", ".join(names) or "none"


def _display_name(node: Node, *, with_cluster: bool) -> str:
    if node["rank"] is None:
        return str(node["instance_id"])
    rank = f"{node['cluster']} {node['rank']}" if with_cluster and node["cluster"] else node["rank"]
    return f"{rank} ({node['instance_id']})"
