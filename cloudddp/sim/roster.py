"""Who is meant by a node's name: the nodes by cluster and rank, and the one that somebody typed.

A rank is what every other verb calls the node: its place in its own cluster, in the order of `inventory.instances`.
Pure: knows the records of pages.py, neither moto nor what a node is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloudddp.aws.inventory import LIVE
from cloudddp.tags import TAG_CLUSTER, TAG_ID, TAG_NODE_RANK, count

Node = dict[str, Any]

_LISTED = 16  # as many nodes as an error lists


class Unclear(Exception):
    """A name that is nobody's, or several nodes'; the message says which there are, the hint what to type."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def ranked(nodes: Sequence[Node], tags: Mapping[str, Mapping[str, str]]) -> list[Node]:
    """The nodes with `cluster` (a name, or None) and `rank` (or None), by cluster and rank. `tags`: by instance id.

    Nodes that are in no cluster have ranks where there is no cluster at all: then they cannot be mistaken.
    """

    def place(node: Node) -> tuple[str, str, int, str, str]:
        own = tags.get(node["instance_id"], {})
        fixed = count(own.get(TAG_NODE_RANK, ""))
        last = 1 << 30 if fixed is None else fixed
        ids = str(node["private_ip"]), str(node["instance_id"])
        return own.get(TAG_CLUSTER, ""), own.get(TAG_ID, ""), last, *ids

    ordered = sorted(nodes, key=place)
    some = any(place(node)[0] for node in ordered)
    taken: dict[tuple[str, str], int] = {}
    found = []
    for node in ordered:
        whose = place(node)[:2]
        counts = node["state"] in LIVE and (bool(whose[0]) or not some)
        found.append({**node, "cluster": whose[0] or None, "rank": taken.get(whose, 0) if counts else None})
        taken[whose] = taken.get(whose, 0) + counts
    return found


def find(nodes: Sequence[Node], name: object, cluster: str | None) -> Node:
    """The node of that rank in `cluster` (or in the only one), instance id, beginning of one, or address.

    `nodes` are as `ranked` returns them. Raises Unclear.
    """
    word = str(name)
    for node in nodes:
        if word in (node["instance_id"], node["private_ip"], node["public_ip"]):
            return node
    if word.isdecimal():
        return _by_rank(nodes, int(word), cluster)
    begun = [node for node in nodes if word.startswith("i-") and node["instance_id"].startswith(word)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise Unclear(f"several nodes begin so: {word}; nodes: {listing(begun)}")
    raise Unclear(f"there is no node {name!r}; nodes: {listing(nodes)}")


def _by_rank(nodes: Sequence[Node], rank: int, cluster: str | None) -> Node:
    names = list(dict.fromkeys(node["cluster"] for node in nodes if node["cluster"]))
    if cluster is not None and cluster not in names:
        raise Unclear(
            f"there is no cluster {cluster!r} in the simulator; clusters: {', '.join(names) or 'none'}",
            "-c NAME chooses another one; an instance id needs none",
        )
    if cluster is None and len(names) > 1:
        raise Unclear(
            f"node {rank} of which cluster? clusters: {', '.join(names)}",
            f"for example -c {names[0]}, or the node's instance id (cloudddp sim status)",
        )
    chosen = cluster or next(iter(names), None)
    members = [node for node in nodes if node["cluster"] == chosen]
    found = [node for node in members if node["rank"] == rank]
    if len(found) == 1:
        return found[0]
    where = f"cluster {chosen!r}" if chosen else "the simulator"
    if found:
        raise Unclear(f"several nodes are node {rank} of {where}; nodes: {listing(found)}")
    raise Unclear(f"there is no node {rank} in {where}; nodes: {listing(members)}")


def listing(nodes: Sequence[Node]) -> str:
    """The nodes in a sentence: `0 (i-...), 1 (i-...)`, with their clusters where there are several."""
    several = len({node["cluster"] for node in nodes}) > 1
    words = [_word(node, with_cluster=several) for node in nodes[:_LISTED]]
    if len(nodes) > _LISTED:
        words.append(f"and {len(nodes) - _LISTED} more")
    return ", ".join(words) or "none"


def _word(node: Node, *, with_cluster: bool) -> str:
    if node["rank"] is None:
        return str(node["instance_id"])
    rank = f"{node['cluster']} {node['rank']}" if with_cluster and node["cluster"] else node["rank"]
    return f"{rank} ({node['instance_id']})"
