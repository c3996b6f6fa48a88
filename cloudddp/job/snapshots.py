"""Before a job is resumed: the newest snapshot that any node holds is copied to the nodes that lack it.

It goes through this computer, one file, in a temporary folder: the nodes have no way to log in to each other. A script that
sends its snapshot to all ranks by itself, as train/ does, needs none of this.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.snapshots import RestoreReply, RestoreRequest, SnapshotReply, SnapshotRequest
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import NodeError
from cloudddp.job.results.pull import pull
from cloudddp.job.sync import PIECE, Progress
from cloudddp.text import one_line, size_of

_SECONDS = 600.0  # to find and check snapshots, and to write one


def spread(runner: Runner, patterns: Sequence[str], progress: Progress) -> None:
    """Copy the newest snapshot to the nodes whose newest one is another. Raises NodeError."""
    if not patterns:
        return
    request = SnapshotRequest(PROJECT, tuple(patterns))
    found = client.call_all(runner, lambda _: request, timeout=_SECONDS)
    for node, reply in found.items():
        for name in reply.skipped:
            progress(f"warning: node {node}: {one_line(name, 200)} is damaged; an older snapshot is used")
    source = newest(found)
    if source is None:
        progress(
            f"no node has a snapshot that matches {', '.join(patterns)}: the job starts from its beginning"
        )
        return
    wanted = found[source]
    lacking = [node for node, one in found.items() if (one.path, one.digest) != (wanted.path, wanted.digest)]
    if not lacking:
        return
    progress(
        f"copying {one_line(wanted.path, 200)}, {size_of(wanted.size)}, from node {source} to node "
        + ", ".join(map(str, lacking))
    )
    with tempfile.TemporaryDirectory(prefix="cloudddp-") as folder:
        pulled = pull(runner, [wanted.path], node=source, to=Path(folder) / "pulled")
        path = Path(folder) / "pulled" / wanted.path
        if not path.is_file() or _digest(path) != wanted.digest:
            why = "; ".join(pulled.notes) or "it has changed"
            raise NodeError(f"node {source}: its snapshot {one_line(wanted.path, 200)} was not copied: {why}")
        restore = RestoreRequest(PROJECT, wanted.path, wanted.mtime_ns, wanted.size)

        def send(node: int) -> RestoreReply | None:
            if node not in lacking:
                return None
            return client.call(runner, node, restore, body=_pieces(path), timeout=_SECONDS)

        replies = runner.each(send).all()
    for node, written in replies.items():
        if written is not None and written.digest != wanted.digest:
            raise NodeError(f"node {node}: the snapshot was damaged on its way", hint="repeat the command")


def newest(found: Mapping[int, SnapshotReply]) -> int | None:
    """Return the node whose snapshot is the newest, the first of several; None if no node has one. Pure."""
    nodes = [node for node, one in sorted(found.items()) if one.path]
    return max(nodes, key=lambda node: (found[node].mtime_ns, -node), default=None)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
