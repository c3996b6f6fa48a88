"""The files that this node offers to the other nodes of a job."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import stat
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.files import records, selection
from agent.files import shared as shared_folders
from agent.files.checkpoints import parts
from agent.files.records import Results
from agent.files.scan import Scan
from agent.files.selection import NewFile
from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol.checkpoints import is_sharded
from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.manifest import time_of
from cloudddp.agent.protocol.sharing import (
    MAX_BEYOND,
    MAX_OFFER,
    MAX_SHARED,
    Offered,
    SharedFiles,
    SnapshotSearch,
)
from cloudddp.agent.protocol.writing import TEMPORARY


def of_node(search: SnapshotSearch) -> tuple[SharedFiles, list[str]]:
    """Return all files that match, the newest first, or the newest one; and newer ones that are damaged.
    Without patterns: what jobs wrote on this node, and copies of what they wrote on others, checkpoints
    first. There are as many as one message may name."""
    project, began = store.project_folder(search.project), phases.first_began()
    elsewhere = (*search.scratch, *shared_folders.places().paths)
    scan = Scan(project, search.outputs, elsewhere, began, again=0, seconds=math.inf)
    new = list(scan) if began else []  # it notes the folders with shards, too
    names: set[str] = set()
    damaged: list[str] = []
    if search.patterns:
        found, damaged = (_matching(search), []) if search.every else newest(search)
    else:
        found, names = _written(scan, new, search.limit) if search.limit else ([], set())
    fitting = _fitting(found)
    left = names.difference(one.path for one in fitting)
    beyond = sorted(left, key=lambda name: (not selection.is_checkpoint(name), name))
    return SharedFiles(fitting, beyond=tuple(beyond[:MAX_BEYOND]), parts=parts(project, scan.shards)), damaged


def newest(search: SnapshotSearch) -> tuple[list[Offered], list[str]]:
    """Return the newest snapshot, if there is one, and newer ones that are damaged."""
    project, damaged = store.project_folder(search.project), list[str]()
    for one in _matching(search):
        if is_sharded([one.path]):  # alone it would be no checkpoint
            continue
        with contextlib.suppress(OSError):
            if has(project, one):
                return [one], damaged
        damaged.append(one.path)
    return [], damaged


def has(project: Path, file: Offered) -> bool:
    """Whether a file is there as it is described, and is not damaged. Raises OSError."""
    info = os.lstat(project / file.path)
    is_same = (info.st_size, max(time_of(info), 0)) == (file.size, file.mtime_ns)
    return is_same and _is_complete(project / file.path, (info.st_ino, info.st_ctime_ns))


@functools.cache
def _is_complete(path: Path, _version: tuple[int, int]) -> bool:
    """Whether a file is complete, as far as that can be seen: torch.save writes zip archives with checksums.
    Raises OSError."""
    if path.suffix != ".pt":
        return True
    with open(path, "rb") as file:
        if file.read(2) not in (b"PK", b""):  # a pickle, as older versions wrote
            return True
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # whatever is wrong with it
        return False


def _written(scan: Scan, new: Iterable[NewFile], limit: int) -> tuple[list[Offered], set[str]]:
    """Return which new files are shared, and the names of all that were to be shared."""
    results = records.results(scan.folder)
    own, shared, names = [], [], set()
    for one in new:
        is_output = one.place in scan.outputs if scan.outputs else one.place != f"{REPLACED}/"
        if is_output and stat.S_ISREG(one.found.info.st_mode) and _can_be_named(one.found.name):
            names.add(one.found.name)
            if results.origin(one.found.name, one.found.info):
                shared.append(one)
            else:
                own.append(one._replace(pulled=False))  # the limit counts those, too: other nodes lack them
    for is_wanted in (True, False):  # checkpoints first
        some = [one for one in own if selection.is_checkpoint(one.found.name) is is_wanted]
        taken = selection.choose(some, limit)[0] if limit else []
        limit = max(limit - sum(one.size for one in taken), 0)
        shared += taken
    described = [_described(one.found.name, one.found.info, results) for one in shared]
    first = sorted(described, key=lambda one: (not selection.is_checkpoint(one.path), -one.mtime_ns))
    return first, names


def _matching(search: SnapshotSearch) -> list[Offered]:
    """Return the files that match, the newest first."""
    project = store.project_folder(search.project)
    excluded, everywhere = set(search.exclude), shared_folders.places().paths
    results, found = records.results(project), {}
    for pattern in search.patterns:
        # Before Python 3.13 a pattern that ends with ** finds folders only.
        for path in project.glob(f"{pattern}/*" if pattern.endswith("**") else pattern):
            name = path.relative_to(project).as_posix()
            if name in excluded or not _can_be_named(name) or shared_folders.is_below(name, everywhere):
                continue
            with contextlib.suppress(OSError):
                info = os.lstat(path)
                if stat.S_ISREG(info.st_mode):
                    found[name] = _described(name, info, results)
    return sorted(found.values(), key=lambda one: -one.mtime_ns)


def _described(name: str, info: os.stat_result, results: Results) -> Offered:
    mode = stat.S_IMODE(info.st_mode) & 0o777
    return Offered(name, max(time_of(info), 0), info.st_size, results.origin(name, info), mode)


def _can_be_named(name: str) -> bool:
    """Whether a message may name a file, and the file is not one that is being written."""
    with contextlib.suppress(UnicodeEncodeError):
        return len(name.encode()) <= MAX_PATH and not name.endswith(TEMPORARY)
    return False


def _fitting(found: Sequence[Offered]) -> tuple[Offered, ...]:
    """Return as many as one message may name."""
    lengths = itertools.accumulate(len(json.dumps(one.path)) + 200 for one in found)  # 200: the other fields
    return tuple([one for one, length in zip(found[:MAX_SHARED], lengths) if length <= MAX_OFFER])
