"""Checkpoints of several files in pulled results: which are whole, which are not and why, and who wrote them.

They are recorded beside the results, for `sync --results`. Results without a record are of unknown origin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Checkpoints, Part
from cloudddp.agent.protocol.codec import ProtocolError, check_length, decode, encode
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.cluster.model import Cluster
from cloudddp.files import Folder
from cloudddp.job.results.safe_names import LOGS

FILE = "checkpoints.json"
MAX_BYTES = 1 << 20


@frozen
class _Record:
    checkpoints: tuple[Part, ...]

    def __post_init__(self) -> None:
        check_length("checkpoints", self.checkpoints, MAX_PARTS)


def known_of(cluster: Cluster, replies: Mapping[int, NewFilesReply], nodes: Collection[int]) -> Checkpoints:
    """Return what these `nodes` have of checkpoints of several files."""
    parts = {node: replies[node].checkpoints for node in nodes if node in replies}
    return Checkpoints(parts, {rank: node.id for rank, node in cluster.nodes.items()})


def not_whole(known: Checkpoints, apart: Iterable[str]) -> dict[str, str]:
    """Return why each checkpoint that was pulled apart is not whole; remnants of older ones do not count."""
    return {folder: known.refusal(folder) for folder in apart if known.doubts[folder]}


def record(results: Path, known: Checkpoints, apart: Collection[str]) -> None:
    """Record beside pulled results what is known of checkpoints that were pulled. Raises OSError."""
    found = read(results)
    for folder, parts in known.parts.items():
        if folder in apart or (results / folder).is_dir():
            one = parts[min(known.holders(folder))]
            found.pop(folder, None)
            found[folder] = Part(folder, job=one.job, attempt=one.attempt, doubt=known.doubts[folder])
    if found:
        with Folder.at(results) as top, top.enter(LOGS, make=0o755) as logs:
            logs.replace(FILE, encode(_Record(tuple(found.values())[-MAX_PARTS:])), 0o644)


def read(results: Path) -> dict[str, Part]:
    """Return what is recorded of the checkpoints in a folder of results; nothing if it cannot be decoded."""
    with contextlib.suppress(OSError, ProtocolError), (results / LOGS / FILE).open("rb") as file:
        return {one.folder: one for one in decode(file.read(MAX_BYTES), _Record).checkpoints}
    return {}
