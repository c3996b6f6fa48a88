"""Syncs the project's files to the nodes: the difference, the tar stream, and the transfer.

Only files that differ from a node's manifest are sent, as one tar stream; files deleted here are deleted there.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.files import ApplyReply, ApplyRequest
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
    Entry,
    Manifest,
    manifest_from_wire,
    manifest_to_wire,
    path_to_wire,
)
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.cluster.model import Cluster
from cloudddp.config.schema import number
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError, NodeError, Text, UsageError
from cloudddp.job import project_files
from cloudddp.job.project_files import Snapshot
from cloudddp.text import size_of

Progress = Callable[[Text], None]

PIECE = 128 * 1024  # bytes
DISK_RESERVE = 64 << 20  # bytes that stay free on a node
APPLY_SECONDS = 600.0  # for a node to take the files


@dataclass(frozen=True, slots=True)
class Difference:
    """How a node's files differ: paths to send, paths to delete there, and the bytes to send."""

    send: tuple[str, ...]
    delete: tuple[str, ...]
    size: int

    @property
    def empty(self) -> bool:
        return not self.send and not self.delete


# -- to the nodes ------------------------------------------------------------------------------------------


def sync(runner: Runner, cluster: Cluster, config: Config, *, root: Path, progress: Progress) -> None:
    """Sync the project's files to every node. Raises UsageError, NodeError."""
    files = project_files.of_config(root, config)
    probes = probe(runner, cluster, manifest=files.digest, python=config.job.python)
    for job in sorted({job for reply in probes.values() for job in reply.running}):
        progress(f"warning: job {job} is running while its files are changed")
    update(runner, probes, config, files, progress)


def update(
    runner: Runner, probes: Mapping[int, ProbeReply], config: Config, files: Snapshot, progress: Progress
) -> None:
    """Make the nodes' project folders like this computer's: one round trip, or none where nothing has changed.

    `probes`: each node's reply to a probe. Raises UsageError, NodeError.
    """
    differences = {
        node: difference(files.manifest, manifest_from_wire(reply.manifest))
        for node, reply in probes.items()
        if reply.manifest is not None
    }
    if not differences:
        progress(f"files are up to date on every node ({len(files.manifest)} files)")
        return
    most = max(differences.values(), key=lambda one: one.size)
    check_size(files, most, config.sync.max_mb)
    for node, one in differences.items():
        free = probes[node].disk_free
        if free < one.size + DISK_RESERVE:
            raise NodeError(f"node {node}: not enough disk space for the project: {free >> 20} MiB free")
    progress(
        f"sending {len(most.send)} file{'s' * (len(most.send) != 1)}, {size_of(most.size)}, to "
        f"{len(differences)} node{'s' * (len(differences) != 1)}"
        + (f"; deleting {len(most.delete)}" if most.delete else "")
    )
    runner.each(
        lambda node: _apply(runner, node, files, differences[node]) if node in differences else None
    ).all()


def _apply(runner: Runner, node: int, files: Snapshot, to_send: Difference) -> ApplyReply:
    request = apply_request(files, to_send, PROJECT)
    return client.call(runner, node, request, body=stream(files, to_send), timeout=APPLY_SECONDS)


# -- what differs ------------------------------------------------------------------------------------------


def difference(here: Mapping[str, Entry], there: Mapping[str, Entry]) -> Difference:
    """Return what to send to and delete on a node with manifest `there`, so that its manifest becomes `here`."""
    send = tuple(name for name, entry in here.items() if there.get(name) != entry)
    delete = tuple(name for name in there if name not in here)
    return Difference(send, delete, sum(here[name].size for name in send))


def check_size(files: Snapshot, to_send: Difference, max_mb: float) -> None:
    """Raise UsageError, naming the largest folders, where a sync would send more than `max_mb`."""
    if to_send.size <= max_mb * 2**20:
        return
    top = "; ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in largest(files.manifest, to_send.send))
    raise UsageError(
        f"the sync would send {to_send.size / 2**20:.0f} MiB to every node, more than sync.max_mb = {number(max_mb)}: {top}",
        hint="add what is not needed on the nodes to .gitignore or sync.exclude, or raise sync.max_mb",
    )


def largest(manifest: Manifest, names: Sequence[str], count: int = 3) -> list[tuple[str, int]]:
    """Return the largest top-level folders or files among `names`, with their bytes."""
    sizes: dict[str, int] = {}
    for name in names:
        top = name.split("/")[0] + ("/" if "/" in name else "")
        sizes[top] = sizes.get(top, 0) + manifest[name].size
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def apply_request(files: Snapshot, to_send: Difference, project: str) -> ApplyRequest:
    """Return the request that the tar stream follows. `project` is the project's folder on the nodes."""
    return ApplyRequest(
        project=project,
        manifest=manifest_to_wire(files.manifest),
        delete=tuple(path_to_wire(path) for path in to_send.delete),
        send=len(to_send.send),
    )


def stream(files: Snapshot, to_send: Difference) -> Iterator[bytes]:
    """Yield the tar stream of the files to send.

    Pieces are about 128 KiB, so that 2,000 small files are not 6,000 packets. A file that changes while it is read is
    padded or cut to the size in the manifest: the next sync sees the difference and sends it again.
    """
    pieces: list[bytes] = []
    waiting = 0
    for piece in _pieces(files, to_send):
        pieces.append(piece)
        waiting += len(piece)
        if waiting >= PIECE:
            yield b"".join(pieces)
            pieces, waiting = [], 0
    yield b"".join(pieces)


def _pieces(files: Snapshot, to_send: Difference) -> Iterator[bytes]:
    for name in to_send.send:
        entry = files.manifest[name]
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = entry.mode, entry.mtime_ns // 10**9
        if entry.kind == LINK:
            member.type, member.linkname = tarfile.SYMTYPE, entry.target
        else:
            member.size = entry.size
        yield member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        if entry.kind == FILE:
            yield from _contents(files.root / name, member.size)
    yield b"\0" * 2 * tarfile.BLOCKSIZE


def _contents(path: Path, size: int) -> Iterator[bytes]:
    left = size
    try:
        file = path.open("rb")
    except OSError as error:
        raise CloudDDPError(
            f"{path} disappeared before it was sent to the nodes: {error.strerror}",
            hint="repeat the command; add temporary files to .gitignore or sync.exclude",
        ) from None
    with file:
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                yield b"\0" * left
                break
            left -= len(piece)
            yield piece
    yield b"\0" * (-size % tarfile.BLOCKSIZE)
