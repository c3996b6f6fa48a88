"""The snapshots that the agents of a job copy between its nodes, before ranks continue from them (infra/node/agent/spread.py)."""

from __future__ import annotations

from collections.abc import Collection

from cloudddp.agent.protocol.snapshots import SnapshotSearch, matches
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec.job import JobSpec

NONE_COPIED = (
    "no file is copied between nodes, since job.share is empty: the script continues from what it finds on each node, "
    "or begins"
)


def looking_for(job: JobSpec, files: Collection[str]) -> SnapshotSearch | None:
    """Return what looks for the files that the nodes share and that are not `files` of the project; None where they share none. A
    pattern of job.share that matches a folder is for all that is in it. Pure."""
    if not (job.share or job.snapshots):
        return None
    patterns = tuple(found for one in job.share for found in (one, f"{one}/**")) or job.snapshots
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotSearch(PROJECT, patterns, sendable, every=bool(job.share))
