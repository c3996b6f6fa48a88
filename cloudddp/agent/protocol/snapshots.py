"""Snapshots and other files that the agents of a job offer each other before ranks start."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Optional

from cloudddp.agent.protocol.checkpoints import MAX_PARTS, SHARD, Checkpoints, Part, folder_of, kind_of
from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    PathText,
    ProjectName,
    ProtocolError,
    ShortText,
    at_most,
    check_length,
    within,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_INSTANCE_ID

MAX_PATTERNS = 200
MAX_SHARED = 2000  # files of a node
MAX_OFFER = 3 << 18  # bytes of one message that names them (gang.LONGEST_MESSAGE is 1 MiB)
MAX_BEYOND = 20  # names
MAX_SNAPSHOT = 1 << 44  # bytes
MAX_EXCLUDED = 100_000  # paths, as many as a project may have
MAX_NS = 1 << 63
LATEST = 86400.0  # seconds by which the clock of another node may be ahead


def _check_path(name: str, text: str) -> None:
    check_length(name, text, MAX_PATH)
    if text.startswith(("/", "~")) or ".." in text.split("/") or "\0" in text:
        raise ProtocolError(f"{name} leaves the project")


ProjectPath = Annotated[str, _check_path]


@frozen
class Snapshot:
    """The newest snapshot of a node by mtime, as a path in the project, with its SHA-256; '' where there is
    none. `skipped` are newer ones that are damaged, the newest first. `origin` is the instance that wrote it,
    or, if that has left the job, that sent it; '' for the node itself."""

    path: ProjectPath = ""
    mtime_ns: Annotated[int, within(0, MAX_NS)] = 0
    size: Annotated[int, within(0, MAX_SNAPSHOT)] = 0
    digest: ShortText = ""
    skipped: Annotated[tuple[PathText, ...], at_most(MAX_PATTERNS)] = ()
    origin: Annotated[str, at_most(MAX_INSTANCE_ID)] = ""
    mode: Annotated[int, within(0, 0o777)] = 0  # permissions; 0 where they are not known


@frozen
class SnapshotSearch:
    """Look for files that match one of the `patterns`, which are relative to the project, but for those in
    `exclude`: files of the project itself. A zip archive whose name ends in .pt, as torch.save writes it, has
    to be complete. `every`: the newest version of each of them is shared; otherwise only the newest file.

    Without patterns, the nodes share what jobs wrote below `outputs` (with (): in the whole project, but for
    `scratch`), each up to `limit` bytes (0: nothing), with those that have no file of that name.
    `restarts_only`: only before a restart, not before the first start."""

    project: ProjectName
    patterns: Annotated[tuple[ProjectPath, ...], at_most(MAX_PATTERNS)]
    exclude: Annotated[tuple[str, ...], at_most(MAX_EXCLUDED)] = ()
    every: bool = False
    outputs: tuple[ProjectPath, ...] = ()
    scratch: tuple[ProjectPath, ...] = ()
    limit: Annotated[int, within(0, MAX_SNAPSHOT)] = 0
    restarts_only: bool = False


@frozen
class Offer:
    """The files that a node shares, the newest first, and the port at which the others can get them. Only the
    newest snapshot has a digest. `beyond`: some of the files that the limit leaves out. `parts`: of sharded
    checkpoints on the node."""

    files: Annotated[tuple[Snapshot, ...], at_most(MAX_SHARED)]
    port: Annotated[int, within(0, (1 << 16) - 1)] = 0
    beyond: Annotated[tuple[PathText, ...], at_most(MAX_BEYOND)] = ()
    parts: Annotated[tuple[Part, ...], at_most(MAX_PARTS)] = ()


def refusal(snapshot: Snapshot, search: SnapshotSearch, latest_ns: float) -> str:
    """Return why a snapshot that another node offers is not written here, or ''. A program on that node must
    not choose which file is replaced, nor make it the newest forever. Pure."""
    if not snapshot.path:
        return ""
    name = repr(snapshot.path[:200])
    if (search.patterns and not matches(snapshot.path, search.patterns)) or snapshot.path in search.exclude:
        return f"{name} is no snapshot of this job"
    if snapshot.mtime_ns > latest_ns:
        return f"the time of {name} is more than a day in the future"
    return ""


@frozen
class Copy:
    """A file that some nodes lack, and the node that has its newest version."""

    file: Snapshot
    source: int
    lacking: tuple[int, ...]


def checkpoints_of(offers: Mapping[int, Offer]) -> Checkpoints:
    return Checkpoints({node: offer.parts for node, offer in offers.items()})


def _sources(path: str, nodes: Iterable[int], known: Checkpoints) -> list[int]:
    """Return from which nodes a file may be copied: of an incomplete checkpoint from none. Shards that are of
    none that is known are of unknown origin."""
    folder = folder_of(path, known.parts)
    if folder is None:
        return [] if kind_of(path) == SHARD else sorted(nodes)
    return [] if known.problems[folder] else sorted(known.holders(folder))


def _has_other(path: str, node: int, known: Checkpoints) -> bool:
    """Whether a node has files of another attempt in the folder of a file."""
    folder = folder_of(path, known.parts)
    return folder is not None and node in known.parts[folder] and node not in known.holders(folder)


def copies(offers: Mapping[int, Offer], *, every: bool) -> list[Copy]:
    """Return what has to be copied so that each node has the newest version of every file, or of the newest
    one. Pure."""
    known = checkpoints_of(offers)
    versions: dict[str, dict[int, Snapshot]] = {}
    for node, offer in sorted(offers.items()):
        for file in offer.files:
            versions.setdefault(file.path, {})[node] = file
    found = []
    for path, versions_of in versions.items():
        sources = _sources(path, offers, known)
        holders = {node: file for node, file in versions_of.items() if node in sources}
        if not holders:
            continue
        source = max(holders, key=lambda node: (holders[node].mtime_ns, -node))
        newest = holders[source]
        lacking = [node for node in sorted(offers) if not _is_same(holders.get(node), newest)]
        found.append(Copy(newest, source, tuple(lacking)))
    if not every:
        found = sorted(found, key=lambda one: (-one.file.mtime_ns, one.source))[:1]
    return [one for one in found if one.lacking]


def default_copies(offers: Mapping[int, Offer], ids: Mapping[int, str]) -> list[Copy]:
    """Return what has to be copied so that the newest version of each file that a node wrote is on those that
    wrote none of that name. `ids` are the instances of the nodes. Copies count as their holders' own files if
    nobody has written that name and the writer has left the job. If the writer is there and lacks the file,
    it has deleted it. Pure."""
    known = checkpoints_of(offers)
    written: dict[str, dict[int, Snapshot]] = {}
    copied: dict[str, dict[int, Snapshot]] = {}
    for node, offer in sorted(offers.items()):
        for file in offer.files:
            if node in _sources(file.path, offers, known):
                (copied if file.origin else written).setdefault(file.path, {})[node] = file
    found = []
    for path in dict.fromkeys((*written, *copied)):
        own, copies_of = written.get(path, {}), copied.get(path, {})
        sources = own or {node: one for node, one in copies_of.items() if one.origin not in ids.values()}
        if not sources:
            continue
        source = max(sources, key=lambda node: (sources[node].mtime_ns, -node))
        newest = sources[source]
        targets = [node for node in sorted(offers) if not _has_other(path, node, known)]
        lacking = [node for node in targets if node not in own and not _is_same(copies_of.get(node), newest)]
        if lacking:
            found.append(Copy(newest, source, tuple(lacking)))
    return found


def differing(offers: Mapping[int, Offer]) -> list[str]:
    """Return the files of which nodes have written different versions themselves. Pure."""
    versions: dict[str, set[tuple[int, int]]] = {}
    for offer in offers.values():
        for file in offer.files:
            if not file.origin:
                versions.setdefault(file.path, set()).add((file.size, file.mtime_ns))
    return [path for path, found in versions.items() if len(found) > 1]


def _is_same(file: Optional[Snapshot], newest: Snapshot) -> bool:
    if file is None:
        return False
    if newest.digest:
        return file.digest == newest.digest
    return (file.size, file.mtime_ns) == (newest.size, newest.mtime_ns)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path in the project matches one of the patterns, as pathlib's glob does. Pure."""
    return any(_matches(path.split("/"), pattern) for pattern in patterns)


def _matches(parts: Sequence[str], pattern: str) -> bool:
    words = [word for word in pattern.split("/") if word not in ("", ".")]

    def closed(reached: Iterable[int]) -> set[int]:
        """Return the positions in the pattern that are reached without another part of the path."""
        found = set(reached)
        for at, word in enumerate(words):
            if at in found and word == "**":
                found.add(at + 1)
        return found

    reached = closed([0])
    for part in parts:
        stay = [at for at in reached if at < len(words) and words[at] == "**"]
        go = [at + 1 for at in reached if at < len(words) and fnmatch.fnmatchcase(part, words[at])]
        reached = closed([*stay, *go])
    return len(words) in reached
