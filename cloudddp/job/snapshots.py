"""The snapshots that the agents of a job copy between its nodes, before ranks continue from them (infra/node/agent/spread.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cloudddp.agent.protocol.snapshots import SnapshotSearch, matches
from cloudddp.cluster.connect import PROJECT

NONE_COPIED = (
    "no snapshot is copied between nodes, since job.snapshots is empty: the script continues from what it finds on each node, "
    "or begins"
)


def looking_for(patterns: Sequence[str], files: Collection[str]) -> SnapshotSearch:
    """Return what looks for files that match `patterns` and are not `files` of the project. Pure."""
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotSearch(PROJECT, tuple(patterns), sendable)
