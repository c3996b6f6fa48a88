"""What the agents of a job copy between its nodes before ranks start (infra/node/agent/share/spread.py)."""

from __future__ import annotations

from collections.abc import Collection

from cloudddp.agent.protocol.snapshots import SnapshotSearch, matches
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec.job import JobSpec


def looking_for(job: JobSpec, files: Collection[str], *, nodes: int, wrote: bool) -> SnapshotSearch | None:
    """Return what looks for the files that the nodes share and that are not `files` of the project; None where they share none. A
    pattern of job.share that matches a folder is for all that is in it. `wrote`: an earlier job wrote something. Pure."""
    patterns = tuple(found for one in job.share for found in (one, f"{one}/**")) or job.snapshots
    if not patterns:
        if nodes < 2 or not job.share_mb or not (wrote or job.retries):
            return None
        limit = max(1, int(job.share_mb * 2**20))
        return SnapshotSearch(
            PROJECT, (), outputs=job.outputs, scratch=job.scratch, limit=limit, restarts_only=not wrote
        )
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotSearch(PROJECT, patterns, sendable, every=bool(job.share))
