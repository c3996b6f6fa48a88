"""The snapshots that the agents of a job copy between its nodes, before ranks continue from them (infra/node/agent/spread.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cloudddp.agent.protocol.snapshots import SnapshotSearch, matches
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec.job import JobSpec
from cloudddp.errors import Text
from cloudddp.text import one_line

SHOWN = 3  # files that are named

NONE_COPIED = (
    "no file is copied between nodes, since job.share is empty: the script continues from what it finds on each node, "
    "or begins"
)


def on_some_nodes(outputs: Mapping[int, Sequence[str]]) -> Text:
    """Return a sentence that names the files of earlier jobs that only some nodes have; '' where all have the same. Pure."""
    everywhere = set.intersection(*map(set, outputs.values()))
    holders: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(set().union(*outputs.values()) - everywhere):
        nodes = tuple(node for node, names in sorted(outputs.items()) if name in names)
        holders.setdefault(nodes, []).append(name)
    if not holders:
        return ""
    listed = "; ".join(
        f"{', '.join(one_line(name, 80) for name in names[:SHOWN])}{', ...' * (len(names) > SHOWN)}: only on node "
        + ", ".join(map(str, nodes))
        for nodes, names in holders.items()
    )
    return f"files of earlier jobs are not on all nodes ({listed}); if the script reads them on all, name them in [job] share"


def looking_for(job: JobSpec, files: Collection[str]) -> SnapshotSearch | None:
    """Return what looks for the files that the nodes share and that are not `files` of the project; None where they share none. A
    pattern of job.share that matches a folder is for all that is in it. Pure."""
    if not (job.share or job.snapshots):
        return None
    patterns = tuple(found for one in job.share for found in (one, f"{one}/**")) or job.snapshots
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotSearch(PROJECT, patterns, sendable, every=bool(job.share))
