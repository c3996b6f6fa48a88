"""What a node gets from the others before ranks start where the user has named no files to share: what jobs
wrote there and not here."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agent.files import records
from agent.files.records import Received
from agent.files.selection import is_checkpoint
from cloudddp.agent.protocol.checkpoints import listed
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.snapshots import (
    LATEST,
    MAX_SHARED,
    Copy,
    Offer,
    Snapshot,
    SnapshotSearch,
    default_copies,
    differing,
    refusal,
)


class Plan(NamedTuple):
    """What this node gets, and for the log what it does not get and why."""

    wanted: list[Copy]
    notes: list[str]


def plan(
    project: Path, search: SnapshotSearch, node: int, peers: Sequence[Peer], offers: Mapping[int, Offer]
) -> Plan:
    """Return what a node gets of these offers: nothing that replaces a file but an older copy of the same
    one, and at most half of the free space. Raises OSError."""
    notes: list[str] = []
    usable = _usable(offers, search, notes)
    known, wanted, in_the_way = records.received(project), [], {}
    for one in default_copies(usable, {peer.node: peer.id for peer in peers}):
        if node not in one.lacking:
            continue
        if obstacle := _obstacle(project, one.file.path, known):
            in_the_way[one.file.path] = obstacle
        else:
            wanted.append(replace(one, lacking=(node,)))
    if in_the_way:
        first = next(iter(in_the_way.values()))
        notes.append(f"not copied to node {node}: {listed(list(in_the_way))}; {first} exists there")
    size, free = sum(one.file.size for one in wanted), shutil.disk_usage(project).free
    if size > free / 2:
        names = listed([one.file.path for one in wanted])
        notes.append(
            f"not copied to node {node}: {names}, {size / 1e6:,.1f} MB; {free / 1e6:,.1f} MB are free there"
        )
        wanted = []
    notes += _differences(usable, search, node, peers)
    return Plan(wanted, notes)


def refused(offers: Mapping[int, Offer], search: SnapshotSearch) -> Iterator[tuple[int, Snapshot, str]]:
    """Yield the nodes that offer files which are not written here, the files, and why."""
    latest = (time.time() + LATEST) * 1e9
    for node, offer in sorted(offers.items()):
        for file in offer.files:
            if why := refusal(file, search, latest):
                yield node, file, why


def _usable(offers: Mapping[int, Offer], search: SnapshotSearch, notes: list[str]) -> dict[int, Offer]:
    """Return the offers without the files that are not written here, which are noted."""
    left: dict[int, dict[str, str]] = {}
    for node, file, why in refused(offers, search):
        left.setdefault(node, {})[file.path] = why
    for node, names in left.items():
        notes.append(f"not copied from node {node}: {listed(list(names))}; {next(iter(names.values()))}")
    return {
        node: replace(offer, files=tuple([one for one in offer.files if one.path not in left.get(node, ())]))
        for node, offer in offers.items()
    }


def _obstacle(project: Path, name: str, known: Received) -> str:
    """Return what is in the place of a file, as a path in the project; '' for nothing, or a copy of it."""
    for parent in map(str, reversed(Path(name).parents)):
        path = project / parent
        if parent != "." and os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return parent
    path = project / name
    return name if os.path.lexists(path) and not known.origin(name, os.lstat(path)) else ""


def _differences(
    offers: Mapping[int, Offer], search: SnapshotSearch, node: int, peers: Sequence[Peer]
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
    for peer in peers:
        stale = [
            file.path
            for file in offers[node].files
            if file.origin and file.origin == peer.id and file.path not in known[peer.node]
        ]
        if stale:
            what = f"copies of files that node {peer.node} does not have any more"
            yield f"node {node} has {what}: {listed(stale)}"
