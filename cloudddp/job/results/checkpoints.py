"""Sharded checkpoints in pulled results: who wrote them, and why one is incomplete, recorded beside the
results for `sync --results`. Each node may have some files of one. If it is complete, they become one folder,
of hard links to what was pulled from each node, so that the next pull still finds it there; if not, they are
in a folder of their own, so that nothing loads them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, MAX_PROBLEM, Checkpoints, Part
from cloudddp.agent.protocol.codec import ProtocolError, at_most, decode, encode
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.files import Folder
from cloudddp.job.results.safe_names import INCOMPLETE, LOGS

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
        return {
            checkpoint.folder: checkpoint for checkpoint in decode(file.read(MAX_BYTES), _Record).checkpoints
        }
    return {}


def move_to_incomplete(results: Path, folder: str) -> None:
    """Move a folder of results that were pulled. Raises OSError."""
    if folder and (results / folder).is_dir():
        place = results / INCOMPLETE / folder
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        (results / folder).rename(place)


def merge_shards(base: Path, folders: Mapping[int, Path], known: Checkpoints) -> list[str]:
    """Link the files of each complete checkpoint of which several of the `folders` (by node) have some
    into one folder below `base`; return the paths of these checkpoints. One of which two nodes have the
    same file is left as it is, and so is one of which a pull has left something out. Raises OSError."""
    merged = []
    for path, parts in sorted(known.parts.items()):
        holders = known.holders(path)
        found = [(node, name) for node in holders for name in parts[node].names]
        is_mergeable = len(holders) > 1 and len({name for _, name in found}) == len(found)
        if known.problems[path] or not is_mergeable or not holders <= folders.keys():
            continue
        if all(os.path.lexists(folders[node] / path / name) for node, name in found):
            for node, name in found:
                if folders[node] != base:
                    _link(folders[node] / path / name, base, f"{path}/{name}")
            merged.append(path)
    return merged


def _link(source: Path, base: Path, path: str) -> None:
    *parents, last = filter(None, path.split("/"))
    if stat.S_ISREG(source.lstat().st_mode):
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(Folder.at(base))
            for name in parents:
                folder = opened.enter_context(folder.enter(name, make=0o755))
            folder.remove(last)
            os.link(source, last, dst_dir_fd=folder.descriptor, follow_symlinks=False)
