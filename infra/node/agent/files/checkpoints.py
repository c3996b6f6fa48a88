"""What this node has of each sharded checkpoint, and who wrote it (cloudddp/agent/protocol/checkpoints.py).

Nothing is recorded for files that ranks write here. The attempt is decided by ctime, which a script cannot
set; the order within it by the earlier of ctime and mtime. Copies of other nodes and what a laptop has put
back are in records.Results. Files that a sync wrote belong to the user and are not part of a checkpoint.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agent.files import paths, records
from agent.files.sync_record import Synced
from agent.jobs import job_record, phases
from agent.node import store
from cloudddp.agent.protocol import checkpoints
from cloudddp.agent.protocol.checkpoints import (
    MAX_FILES,
    MAX_PARTS,
    MAX_PROBLEM,
    METADATA,
    SHARD,
    UNKNOWN,
    Part,
    Writer,
    is_of_rank,
    is_shard,
    listed,
)
from cloudddp.agent.protocol.jobs import StateFile
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.writing import TEMPORARY

MAX_READ = 1 << 26  # bytes of one .metadata
MAX_NAMES = 1 << 17  # bytes of all names in one message


class _File(NamedTuple):
    info: os.stat_result
    writer: Writer
    is_copy: bool


class Files:
    """The files of sharded checkpoints in a project, with the job and the attempt that wrote each; UNKNOWN
    for a file that was there before the first job, and where the record of copies is damaged or was not
    completed. Copies of what the instances in `present` wrote do not count."""

    def __init__(self, project: Path, present: Collection[str] = ()) -> None:
        self._project, self._present, self._manifest = project, present, Synced(project).recorded
        self._attempts = phases.attempts()
        self._times = [time for time, _, _ in self._attempts]
        self.results = records.results(project)

    def of(self, folder: str) -> dict[str, _File]:
        """Return the files of a checkpoint by their names below its folder; none for any other folder."""
        every = checkpoints.STEP.fullmatch(os.path.basename(folder))
        found: dict[str, _File] = {}
        top = self._project / folder
        for where, inner, names in os.walk(top):
            if not every:
                inner.clear()
            if not every and not any(map(is_shard, names)):
                return {}
            for name in names:
                path = os.path.join(where, name)
                with contextlib.suppress(OSError, UnicodeEncodeError):  # a message cannot name all
                    path.encode()
                    self._add(found, os.path.relpath(path, top), os.path.relpath(path, self._project))
        return found if checkpoints.is_dedicated(folder, found) else {}

    def _add(self, found: dict[str, _File], name: str, in_project: str) -> None:
        path = self._project / in_project
        info, synced = os.lstat(path), self._manifest.get(in_project)
        is_file = stat.S_ISREG(info.st_mode) and not name.endswith(TEMPORARY)
        if not is_file or len(found) == MAX_FILES or (synced and paths.describe(path) == synced):
            return
        if (copy := self.results.copy(in_project, info)) is not None:
            if copy.id not in self._present:
                found[name] = _File(info, (copy.job, copy.attempt), is_copy=True)
            return
        at = bisect.bisect_right(self._times, info.st_ctime_ns)
        is_known = at and not self.results.damaged
        found[name] = _File(info, self._attempts[at - 1][1:] if is_known else UNKNOWN, is_copy=False)

    def stale_copies(self) -> list[str]:
        """Return the copies beside which an attempt has begun to write another save in the same folder."""
        stale = []
        shards = filter(is_shard, self.results.copies)
        for folder in {checkpoints.checkpoint_of(os.path.dirname(name)) for name in shards}:
            files = self.of(folder)
            own = [one.writer for name, one in files.items() if is_shard(name) and not one.is_copy]
            newest = max(own, default=UNKNOWN)
            older = [name for name, one in files.items() if one.is_copy and one.writer < newest]
            stale += [os.path.join(folder, name) for name in older]
        return sorted(stale)


def parts(project: Path, folders: Iterable[str], present: Collection[str] = ()) -> tuple[Part, ...]:
    """Return the parts of the checkpoints to which shards in these folders belong, the newest first, as many
    as one message may have. `present`: as for Files."""
    known = Files(project, present)
    found: list[Part] = []
    for folder in sorted({checkpoints.checkpoint_of(folder) for folder in folders}):
        files = known.of(folder)
        if known.results.damaged or any(one.writer != UNKNOWN for one in files.values()):
            found += [_part(project, folder, files)] if files else []
    chosen: list[Part] = []
    seen: set[Writer] = set()
    length = 0
    for part in sorted(found, key=lambda one: -one.written):
        length += sum(
            len(json.dumps(name)) for name in (part.folder, *part.names, *part.older, *part.lacking)
        )
        if length > MAX_NAMES or len(chosen) == MAX_PARTS:
            break
        is_newest = part.job and part.writer not in seen
        chosen.append(replace(part, unfinished=True) if is_newest and not _succeeded(part) else part)
        seen.add(part.writer)
    return tuple(chosen)


def _named_in(metadata: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return checkpoints.named_in(store.read_bytes(metadata, MAX_READ))
    return set()


def _part(project: Path, folder: str, files: Mapping[str, _File]) -> Part:
    shards = {name: one for name, one in files.items() if is_shard(name)}
    job, attempt = newest = max(shard.writer for shard in shards.values())
    listings = {os.path.dirname(n): n for n in shards if os.path.basename(n) == METADATA}
    listings = {inner: name for inner, name in listings.items() if shards[name].writer == newest}
    inside = {inner: _named_in(project / folder / name) for inner, name in listings.items()}
    unread = [name for inner, name in listings.items() if not inside[inner]]
    named = {os.path.join(inner, name) for inner, names in inside.items() for name in names}
    # torch.distributed.checkpoint leaves shards of more ranks than there are now; `.metadata` names its own.
    left = {
        name
        for name in shards
        if name.endswith(SHARD) and os.path.dirname(name) in inside and name not in named
    }
    strange = [name for name, one in shards.items() if one.writer == UNKNOWN and name not in left]
    older = [name for name, one in shards.items() if one.writer not in (newest, UNKNOWN) and name not in left]
    times: tuple[dict[str, int], dict[str, int]] = ({}, {})  # of shards, and of .metadata
    for name, one in shards.items():
        inner, last = os.path.split(name)
        is_timed = last == METADATA or last.endswith(SHARD)
        if is_timed and one.writer == newest != UNKNOWN and not one.is_copy and name not in left:
            # A script may have copied the folder with its times, in any order.
            written = max(min(one.info.st_ctime_ns, one.info.st_mtime_ns), 0)
            of = times[last == METADATA]
            of[inner] = max(of.get(inner, 0), written)
    shards_at, metadata_at = times
    mixed = any(written > metadata_at.get(inner, written) for inner, written in shards_at.items())
    problem = ""
    if mixed:
        problem = f"a shard was written after {METADATA}: another save had begun"
    elif len(files) == MAX_FILES:
        problem = f"it has more than {MAX_FILES:,} files"
    elif unread:
        problem = f"{listed(unread)} cannot be read"
    elif strange:
        problem = f"{listed(strange)} {'are' if len(strange) > 1 else 'is'} of unknown origin"
    names = sorted(files.keys() - left - set(older))
    for others in (job_record.elsewhere(store.job_folder(job), project) if job else {}).values():
        for path in filter(is_of_rank, others):
            if checkpoints.checkpoint_of(os.path.dirname(path)) == folder:
                named.add(os.path.relpath(path, folder or "."))
    return Part(
        folder,
        tuple(names),
        job,
        attempt,
        older=tuple(sorted(older)),
        written=max(one.info.st_ctime_ns for one in files.values()),
        problem=problem[:MAX_PROBLEM],
        mixed=mixed,
        lacking=tuple(sorted(named.difference(names))),
        shards=shards_at,
        metadata=metadata_at,
        ahead=job_record.ahead(store.job_folder(job), attempt) if job and metadata_at else {},
    )


def _succeeded(part: Part) -> bool:
    folder = store.job_folder(part.job)
    state = store.read(folder / phases.STATE_FILE, StateFile)
    is_last = state is not None and state.restarts == part.attempt
    return is_last and phases.phase_of(folder) is JobPhase.SUCCEEDED
