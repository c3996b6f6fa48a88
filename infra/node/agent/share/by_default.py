"""What a node gets from the others before ranks start where the user has named no files to share: what jobs
wrote there and not here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.files import records
from agent.files.records import Results
from agent.files.selection import is_checkpoint
from cloudddp.agent.protocol.checkpoints import listed
from cloudddp.agent.protocol.sharing import MAX_SHARED, Copy, Offer, SnapshotSearch, differing


def checked(
    project: Path,
    search: SnapshotSearch,
    node: int,
    ids: Mapping[int, str],
    offers: Mapping[int, Offer],
    wanted: Sequence[Copy],
) -> tuple[list[Copy], list[str]]:
    """Return what a node gets of what it lacks: nothing that replaces a file but an older copy of the same
    one, and at most half of the free space; and for the log what it does not get, and why. Raises OSError."""
    known, in_the_way = records.results(project), {}
    for one in wanted:
        if obstacle := _obstacle(project, one.file.path, known):
            in_the_way[one.file.path] = obstacle
    notes = list(_differences(offers, search, node, ids))
    if in_the_way:
        first = next(iter(in_the_way.values()))
        notes.append(f"not copied to node {node}: {listed(in_the_way)}; {first} exists there")
    left = [one for one in wanted if one.file.path not in in_the_way]
    size, free = sum(one.file.size for one in left), shutil.disk_usage(project).free
    if size > free / 2:
        what = f"{listed([one.file.path for one in left])}, {size / 1e6:,.1f} MB"
        notes.append(f"not copied to node {node}: {what}; {free / 1e6:,.1f} MB are free there")
        left = []
    return left, notes


def _obstacle(project: Path, name: str, known: Results) -> str:
    """Return what is in the place of a file, as a path in the project; '' for nothing, or a copy of it."""
    for parent in map(str, reversed(Path(name).parents)):
        path = project / parent
        if parent != "." and os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return parent
    path = project / name
    return name if os.path.lexists(path) and not known.origin(name, os.lstat(path)) else ""


def _differences(
    offers: Mapping[int, Offer], search: SnapshotSearch, node: int, ids: Mapping[int, str]
) -> Iterator[str]:
    """Yield what is not the same on all nodes although it is not copied."""
    known = {one: {*offer.beyond, *(file.path for file in offer.files)} for one, offer in offers.items()}
    lacked = [name for name in offers[node].beyond if not all(name in names for names in known.values())]
    if lacked:
        what = ", ".join(filter(is_checkpoint, lacked)) or listed(lacked)
        yield (
            f"node {node}: not copied to other nodes: {what}. The limits are "
            f"[job] share_mb = {search.limit / 2**20:g} and {MAX_SHARED:,} files; name what all "
            "ranks read in [job] share"
        )
    if node == min(offers) and (names := differing(offers)):
        yield (
            f"each node keeps its own version: {listed(names)}. If all ranks read the newest one, "
            "name it in [job] share"
        )
    copied = [one for one in offers[node].files if one.origin]
    for other, instance in ids.items():
        if stale := [one.path for one in copied if one.origin == instance and one.path not in known[other]]:
            what = f"copies of files that node {other} does not have any more"
            yield f"node {node} has {what}: {listed(stale)}"
