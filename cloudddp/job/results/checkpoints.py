"""Sharded checkpoints in pulled results: who wrote them, and why one is incomplete.

This is recorded beside the results, for `sync --results`. Those without a record are of unknown origin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, MAX_PROBLEM, Checkpoints, Part
from cloudddp.agent.protocol.codec import ProtocolError, at_most, decode, encode
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.files import Folder
from cloudddp.job.results.safe_names import LOGS

FILE = "checkpoints.json"
MAX_BYTES = 1 << 20


@frozen
class _Record:
    checkpoints: Annotated[tuple[Part, ...], at_most(MAX_PARTS)]


def on(nodes: Collection[int], replies: Mapping[int, NewFilesReply]) -> Checkpoints:
    """Return the sharded checkpoints on these nodes."""
    return Checkpoints({node: replies[node].checkpoints for node in nodes if node in replies})


def record(results: Path, known: Checkpoints, incomplete: Collection[str]) -> None:
    """Record beside pulled results what is known of the checkpoints among them. Raises OSError."""
    found = read(results)
    for folder, parts in known.parts.items():
        is_here = folder in incomplete or (results / folder).is_dir()
        if is_here and not known.is_leftover(folder):
            one, why = parts[min(known.holders(folder))], known.problems[folder][:MAX_PROBLEM]
            found.pop(folder, None)
            found[folder] = Part(folder, job=one.job, attempt=one.attempt, problem=why)
    if found:
        with Folder.at(results) as top, top.enter(LOGS, make=0o755) as logs:
            logs.replace(FILE, encode(_Record(tuple(found.values())[-MAX_PARTS:])), 0o644)


def read(results: Path) -> dict[str, Part]:
    """Return what is recorded of the checkpoints in a folder of results; nothing if it cannot be decoded."""
    with contextlib.suppress(OSError, ProtocolError), (results / LOGS / FILE).open("rb") as file:
        return {one.folder: one for one in decode(file.read(MAX_BYTES), _Record).checkpoints}
    return {}
