"""What the nodes of a job copy from each other: from which of them to which, and in which order. Pure.

Before ranks start: what [job] share names, or the newest snapshot of it, or by default what jobs wrote.
Before a node ends: the newest snapshot, where the job names patterns.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated

from cloudddp.agent.protocol.checkpoints import (
    MAX_PARTS,
    SHARD,
    Checkpoints,
    Part,
    ProjectPath,
    folder_of,
    kind_of,
)
from cloudddp.agent.protocol.codec import PathText, ProjectName, at_most, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_INSTANCE_ID

MAX_SHARED = 2000  # files of a node
MAX_OFFER = 3 << 18  # bytes of one message that names them (gang.LONGEST_MESSAGE is 1 MiB)
MAX_BEYOND = 20  # names
MAX_SNAPSHOT = 1 << 44  # bytes
LATEST = 86400.0  # seconds by which the clock of another node may be ahead
WIDTH = 4  # nodes that one node serves at a time


@frozen
class Offered:
    """A file that a node has, by its path in the project. `origin` is the instance that wrote it, or, if that
    has left the job, that sent it; '' for the node itself."""

    path: ProjectPath
    mtime_ns: Annotated[int, within(0, 1 << 63)] = 0
    size: Annotated[int, within(0, MAX_SNAPSHOT)] = 0
    origin: Annotated[str, at_most(MAX_INSTANCE_ID)] = ""
    mode: Annotated[int, within(0, 0o777)] = 0o644  # permissions


@frozen
class SnapshotSearch:
    """Look for files that match one of the `patterns`, which are relative to the project, but for those in
    `exclude`: files of the project itself. A zip archive whose name ends in .pt, as torch.save writes it, has
    to be complete. `every`: the newest version of each of them is shared; otherwise only the newest file.

    Without patterns, the nodes share what jobs wrote below `outputs` (with (): in the whole project, but for
    `scratch`), each up to `limit` bytes (0: nothing), with those that have no file of that name.
    `restarts_only`: only before a restart, not before the first start."""

    project: ProjectName
    patterns: Annotated[tuple[ProjectPath, ...], at_most(200)]
    exclude: Annotated[tuple[str, ...], at_most(100_000)] = ()
    every: bool = False
    outputs: tuple[ProjectPath, ...] = ()
    scratch: tuple[ProjectPath, ...] = ()
    limit: Annotated[int, within(0, MAX_SNAPSHOT)] = 0
    restarts_only: bool = False


@frozen
class SharedFiles:
    """The files that a node shares, the newest first, and the port at which the others can get them.
    `beyond`: some of the files that the limit leaves out. `parts`: of sharded checkpoints on the node."""

    files: Annotated[tuple[Offered, ...], at_most(MAX_SHARED)]
    port: Annotated[int, within(0, (1 << 16) - 1)] = 0
    beyond: Annotated[tuple[PathText, ...], at_most(MAX_BEYOND)] = ()
    parts: Annotated[tuple[Part, ...], at_most(MAX_PARTS)] = ()


def refusal(file: Offered, search: SnapshotSearch, latest_ns: float) -> str:
    """Return why a file that another node offers is not written here, or ''. A program on that node must not
    choose which file is replaced, nor make it the newest forever. Pure."""
    name = repr(file.path[:200])
    if (search.patterns and not matches(file.path, search.patterns)) or file.path in search.exclude:
        return f"{name} is no snapshot of this job"
    if file.mtime_ns > latest_ns:
        return f"the time of {name} is more than a day in the future"
    return ""


# -- what is copied ------------------------------------------------------------------------------------------


@frozen
class Copy:
    """A file, with the instance that wrote it; the nodes that have it, first the one that wrote it or counts
    as its writer; and the nodes that lack it."""

    file: Offered
    holders: tuple[int, ...]
    lacking: tuple[int, ...]


def copies(
    offers: Mapping[int, SharedFiles], ids: Mapping[int, str], *, every: bool, replaces: bool
) -> list[Copy]:
    """Return what has to be copied so that the nodes have the newest version of `every` file, or of the
    newest one. `ids` are the instances of the nodes. Nothing is copied of an incomplete sharded checkpoint.

    If it `replaces` no other version, a node keeps what it wrote itself. A copy then counts as its holder's
    own file only if nobody has written that name and the writer has left the job: a writer that is there and
    lacks the file has deleted it. Pure."""
    known = checkpoints_of(offers)
    versions: dict[str, dict[int, Offered]] = {}
    for node, offer in sorted(offers.items()):
        for file in offer.files:
            versions.setdefault(file.path, {})[node] = file
    found = []
    for path, every_version in versions.items():
        sources, others = _of_checkpoint(path, offers.keys(), known)
        have = {node: file for node, file in every_version.items() if node in sources}
        own = {node: file for node, file in have.items() if replaces or not file.origin}
        counted = own or {node: file for node, file in have.items() if file.origin not in ids.values()}
        if not counted:
            continue
        writer = max(counted, key=lambda node: (counted[node].mtime_ns, -node))
        newest = counted[writer]
        holders = [node for node in have if _version(have[node]) == _version(newest)]
        kept = [] if replaces else [*own, *others]
        origin = newest.origin if newest.origin in ids.values() else ids[writer]
        first = (writer, *(node for node in holders if node != writer))
        lacking = tuple(sorted(offers.keys() - {*holders, *kept}))
        found.append(Copy(replace(newest, origin=origin), first, lacking))
    if not every:
        found = sorted(found, key=lambda one: (-one.file.mtime_ns, one.holders[0]))[:1]
    return [one for one in found if one.lacking]


def differing(offers: Mapping[int, SharedFiles]) -> list[str]:
    """Return the files of which nodes have written different versions themselves. Pure."""
    versions: dict[str, set[tuple[int, int]]] = {}
    for offer in offers.values():
        for file in offer.files:
            if not file.origin:
                versions.setdefault(file.path, set()).add(_version(file))
    return [path for path, found in versions.items() if len(found) > 1]


def _version(file: Offered) -> tuple[int, int]:
    return file.size, file.mtime_ns


def checkpoints_of(offers: Mapping[int, SharedFiles]) -> Checkpoints:
    return Checkpoints({node: offer.parts for node, offer in offers.items()})


def _of_checkpoint(path: str, nodes: Set[int], known: Checkpoints) -> tuple[Set[int], Set[int]]:
    """Return from which nodes a file may be copied, of an incomplete sharded checkpoint from none; and which
    nodes have files of another attempt in its folder. A shard of none that is known is of unknown origin."""
    folder = folder_of(path, known.parts)
    if folder is None:
        return set() if kind_of(path) == SHARD else nodes, set()
    newest = known.holders(folder)
    return set() if known.problems[folder] else newest, known.parts[folder].keys() - newest


# -- in which order ------------------------------------------------------------------------------------------


def next_sources(busy: Mapping[int, int], lacking: Sequence[int]) -> dict[int, int]:
    """Return which nodes can begin now, and from which holder each gets its files. `busy`: how many nodes
    each holder serves now; the least busy one comes first, then the one with the lowest number. Pure."""
    places = [(turn, node) for node, count in busy.items() for turn in range(count, WIDTH)]
    return {node: source for node, (_, source) in zip(lacking, sorted(places))}


def rounds(holders: Iterable[int], lacking: Iterable[int]) -> list[dict[int, int]]:
    """Return, round by round, from which node each node gets its files: each node that has them serves up to
    WIDTH others, which then serve others. Pure."""
    have, rest, found = set(holders), set(lacking), []
    while have and rest:
        sources = next_sources(dict.fromkeys(have, 0), sorted(rest))
        found.append(sources)
        have |= sources.keys()
        rest -= sources.keys()
    return found


# -- patterns ------------------------------------------------------------------------------------------------


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path in the project matches one of the patterns, as pathlib's glob does. Pure."""
    return any(_matches(path.split("/"), pattern) for pattern in patterns)


def _matches(parts: Sequence[str], pattern: str) -> bool:
    ends = {0}  # how many parts the words so far may match
    for word in pattern.split("/"):
        if word == "**":
            ends = set(range(min(ends, default=len(parts) + 1), len(parts) + 1))
        elif word not in ("", "."):
            ends = {at + 1 for at in ends if at < len(parts) and fnmatch.fnmatchcase(parts[at], word)}
    return len(parts) in ends
