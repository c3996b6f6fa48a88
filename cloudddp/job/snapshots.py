"""Before a job is resumed: the newest snapshot that any node holds is copied to the nodes that lack it.

It goes through this computer, one file, in a temporary folder: the nodes have no way to log in to each other. A script that
sends its snapshot to all ranks by itself, as train/ does, needs none of this.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.snapshots import (
    RestoreReply,
    RestoreRequest,
    SnapshotReply,
    SnapshotRequest,
    matches,
)
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import Command, NodeError
from cloudddp.job.results.pull import pull
from cloudddp.job.sync import PIECE, Progress
from cloudddp.text import one_line, size_of

_SECONDS = 600.0  # to find and check snapshots, and to write one
_LATEST = 86400.0  # seconds by which the clock of a node may be ahead of this one


def spread(runner: Runner, patterns: Sequence[str], files: Collection[str], progress: Progress) -> None:
    """Copy the newest snapshot to the nodes whose newest one is another. `files` are those of the project on this computer,
    which are no snapshots. Raises NodeError."""
    if not patterns:
        progress(
            "no snapshot was copied between nodes, since job.snapshots is empty: the script continues from what it finds "
            "on each node, or begins"
        )
        return
    request = looking_for(patterns, files)
    found = client.call_all(runner, lambda _: request, timeout=_SECONDS)
    for node, reply in found.items():
        _check(node, reply, patterns, files)
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
        if not path.is_file() or path.stat().st_size != wanted.size or _digest(path) != wanted.digest:
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


def looking_for(patterns: Sequence[str], files: Collection[str]) -> SnapshotRequest:
    """Return the request for files that match `patterns` and are not `files` of the project. Pure."""
    own = {name for name in files if matches(name, patterns)}
    sendable = tuple(sorted(name for name in own if name.isprintable()))
    return SnapshotRequest(PROJECT, tuple(patterns), sendable)


def _check(node: int, reply: SnapshotReply, patterns: Sequence[str], files: Collection[str]) -> None:
    """Raise NodeError for a snapshot that no agent reports. It would be written on the other nodes: a program on one of them
    must not choose which file, nor make it the newest for ever."""
    if not reply.path:
        return
    why = ""
    if not matches(reply.path, patterns):
        why = f"which no pattern of job.snapshots matches ({', '.join(patterns)})"
    elif reply.path in files:
        why = "which is a file of the project"
    elif reply.mtime_ns > (time.time() + _LATEST) * 1e9:
        why = "whose time is more than a day in the future"
    if why:
        raise NodeError(
            f"node {node} reports {one_line(reply.path, 200)} as its newest snapshot, {why}; nothing was copied",
            hint=("look at the node with ", Command("ssh", str(node))),
        )


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
