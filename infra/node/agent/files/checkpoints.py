"""What this node has of each folder of shards, and who wrote it (cloudddp/agent/protocol/checkpoints.py).

Nothing is recorded for files that ranks write here: each belongs to the attempt that had begun when it was
written, by ctime, which a script cannot set. Copies of other nodes and what a laptop has put back are in
records.Received. What a sync wrote is the user's, and no part of a checkpoint of ours.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agent.files import paths, records
from agent.files.sync_record import Synced
from agent.jobs import clocks, phases
from agent.node import store
from cloudddp.agent.protocol import checkpoints
from cloudddp.agent.protocol.checkpoints import (
    MAX_DOUBT,
    MAX_FILES,
    MAX_PARTS,
    METADATA,
    SHARD,
    UNKNOWN,
    Part,
    Writer,
    listed,
    title,
)
from cloudddp.agent.protocol.phases import JobPhase

MAX_READ = 1 << 26  # bytes of one .metadata or index
MAX_NAMES = 1 << 17  # bytes of all names in one message


class Writers:
    """Tells who wrote a file of the project."""

    def __init__(self, project: Path) -> None:
        self._marks = phases.attempts()
        self._times = [time for time, _, _ in self._marks]
        self.received = records.received(project)

    def of(self, name: str, info: os.stat_result) -> Writer:
        """Return the job and the attempt; UNKNOWN for a file that was there before the first job, and where
        the record of copies is damaged or was not completed."""
        if (copy := self.received.copy(name, info)) is not None:
            return copy.job, copy.attempt
        at = bisect.bisect_right(self._times, info.st_ctime_ns)
        return self._marks[at - 1][1:] if at and not self.received.is_doubtful(name) else UNKNOWN


class ReceivedCopies:
    """The copies of checkpoints that this node has got so far."""

    def __init__(self, project: Path) -> None:
        self._project, self._writers = project, Writers(project)
        received = self._writers.received.files
        self._units = {checkpoints.unit_of(os.path.dirname(name)) for name in received}
        self._manifest = Synced(project).recorded if self._units else {}

    def stale(self) -> list[str]:
        """Return those beside which an attempt has begun to write another checkpoint in the same folder."""
        found = []
        for unit in self._units:
            files = _files(self._project, unit, self._writers, self._manifest)
            newest = max((one.writer for one in files.values() if one.is_own), default=UNKNOWN)
            stale = [name for name, one in files.items() if not one.is_own and one.writer < newest]
            found += [os.path.join(unit, name) for name in stale]
        return sorted(found)


class _File(NamedTuple):
    info: os.stat_result
    writer: Writer
    is_own: bool


def parts(project: Path, folders: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts of the checkpoints to which shards in these folders belong, the newest first, as many
    as one message may have."""
    writers, manifest = Writers(project), Synced(project).recorded
    found: list[tuple[int, Part]] = []
    for unit in sorted({checkpoints.unit_of(folder) for folder in folders}):
        files = _files(project, unit, writers, manifest)
        known = any(one.writer != UNKNOWN or writers.received.damaged for one in files.values())
        if known and any(map(checkpoints.is_shard, files)):
            newest = max(one.info.st_ctime_ns for one in files.values())
            found.append((newest, _part(project, unit, files)))
    found.sort(key=lambda one: -one[0])
    chosen: list[Part] = []
    length = 0
    for part in _with_unfinished([one for _, one in found]):
        length += sum(len(json.dumps(name)) for name in (part.folder, *part.names, *part.named))
        if length > MAX_NAMES or len(chosen) == MAX_PARTS:
            break
        chosen.append(part)
    return tuple(chosen)


def _files(project: Path, unit: str, writers: Writers, manifest: Any) -> dict[str, _File]:
    """Return the files of a checkpoint by their names below its folder: all in the folder of a step, else
    those that are shards by name."""
    every = checkpoints.STEP.fullmatch(os.path.basename(unit))
    found: dict[str, _File] = {}
    for where, inner, names in os.walk(project / unit):
        if not every:
            inner.clear()
        for name in names:
            path = os.path.join(where, name)
            in_project = os.path.relpath(path, project)
            if name.endswith(paths.TEMPORARY) or not (every or checkpoints.is_shard(name)):
                continue
            if in_project in manifest and paths.describe(path) == manifest[in_project]:
                continue
            with contextlib.suppress(OSError, UnicodeEncodeError):
                in_project.encode()  # as a message names it
                info = os.lstat(path)
                if stat.S_ISREG(info.st_mode) and len(found) < MAX_FILES:
                    writer = writers.of(in_project, info)
                    is_own = writer != UNKNOWN and writers.received.copy(in_project, info) is None
                    found[os.path.relpath(path, project / unit)] = _File(info, writer, is_own)
    return found


def _part(project: Path, unit: str, files: dict[str, _File]) -> Part:
    named, unread = set(), []
    for name in files:
        folder = os.path.dirname(name)
        if os.path.basename(name) == METADATA or name.endswith(".index.json"):
            try:
                named |= {os.path.join(folder, one) for one in _named(project / unit / name)}
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                unread.append(name)
    # torch.distributed.checkpoint leaves shards of more ranks than there are now; `.metadata` names its own.
    listing = {os.path.dirname(name) for name in files if os.path.basename(name) == METADATA}
    files = {
        name: one
        for name, one in files.items()
        if not name.endswith(SHARD) or os.path.dirname(name) not in listing or name in named
    }
    job, attempt = newest = max(one.writer for one in files.values())
    shards: dict[str, int] = {}
    metadata: dict[str, int] = {}
    for name, one in files.items():
        folder, last = os.path.split(name)
        # A script may have copied the folder with its times, in any order.
        written = max(min(one.info.st_ctime_ns, one.info.st_mtime_ns), 0)
        if one.is_own and last == METADATA:
            metadata[folder] = written
        elif one.is_own and last.endswith(SHARD):
            shards[folder] = max(shards.get(folder, 0), written)
    doubt, mixed = "", ""
    older = [name for name, one in files.items() if one.writer not in (newest, UNKNOWN)]
    if len(files) == MAX_FILES:
        doubt = f"it has more than {MAX_FILES:,} files"
    elif unread:
        doubt = f"{listed(unread)} cannot be read"
    elif strange := [name for name, one in files.items() if one.writer == UNKNOWN]:
        doubt = f"{listed(strange)} is of unknown origin"
    if older and checkpoints.is_one(files):
        other = max(files[name].writer for name in older)
        mixed = f"{listed(older)} is of {title(*other)}, and the rest of {title(*newest)}"
    elif any(written > metadata.get(folder, written) for folder, written in shards.items()):
        mixed = f"a shard was written after {METADATA}: another save had begun"
    return Part(
        unit,
        tuple(sorted(files)),
        job,
        attempt,
        doubt=(mixed or doubt)[:MAX_DOUBT],
        mixed=bool(mixed),
        named=tuple(sorted(named)),
        shards=shards,
        metadata=metadata,
        ahead=clocks.ahead(store.job_folder(job), attempt) if job and metadata else {},
    )


def _named(path: Path) -> set[str]:
    """Return the shards that a `.metadata` or an index names. Raises whatever an odd file causes."""
    data = store.read_bytes(path, MAX_READ)
    if path.name == METADATA:
        if not (named := checkpoints.named_in(data)):
            raise ValueError("it names no shard")
        return named
    weights = json.loads(data)["weight_map"]
    return {str(name) for name in weights.values()}


def _with_unfinished(found: list[Part]) -> list[Part]:
    """Return the parts, with a mark on the newest one of an attempt that has not succeeded. Where there is a
    `.metadata`, that says more."""
    seen: set[Writer] = set()
    marked = []
    for part in found:
        is_newest = part.writer not in seen
        seen.add(part.writer)
        has_metadata = any(os.path.basename(name) == METADATA for name in part.names)
        if part.job and is_newest and not has_metadata and not _succeeded(*part.writer):
            part = replace(part, unfinished=True)
        marked.append(part)
    return marked


def _succeeded(job: str, attempt: int) -> bool:
    folder = store.job_folder(job)
    last = max((number for _, name, number in phases.attempts() if name == job), default=0)
    return attempt == last and phases.phase_of(folder) is JobPhase.SUCCEEDED
