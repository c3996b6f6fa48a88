"""What jobs wrote where a sync writes: it is kept in a folder of the project, and never overwritten or
deleted.

A rename keeps it, so it takes no space but its own. As any new file of a job, it is pulled by default, and
counts as not pulled until then. A link is not kept: it has no contents.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Callable, Optional

from agent.files import paths, records
from agent.files.scan import CACHES
from agent.jobs import phases
from cloudddp.agent.protocol.file_steps import MAX_KEPT, REPLACED, Kept
from cloudddp.agent.protocol.manifest import Entry, path_to_wire
from cloudddp.agent.protocol.transfer import Record as FileRecord
from cloudddp.agent.protocol.writing import known_of, open_file


class Replaced:
    """`synced`: the files that a sync has written. `place` opens the folder of a name, and returns it with
    the last part of the name."""

    def __init__(
        self, project: Path, synced: Mapping[str, Entry], place: Callable[[str], tuple[int, str]]
    ) -> None:
        self._project, self._synced, self._place = project, synced, place
        self._folder = _folder_name()
        self._names: list[str] = []
        self._jobs: Optional[tuple[int, records.Results]] = None

    def keep(self, parent: int, base: str, name: str, record: Optional[FileRecord] = None) -> None:
        """Move what is there under a name out of the way if it is a job's, unless it is what `record`
        describes."""
        try:
            info = os.lstat(base, dir_fd=parent)
        except OSError:
            return
        is_synced = name in self._synced and paths.describe(base, parent) == self._synced[name]
        if is_synced or name.startswith(f"{REPLACED}/"):
            return
        if stat.S_ISDIR(info.st_mode):
            is_kept = self._has_new_files(parent, base, name)
        else:
            is_new = stat.S_ISREG(info.st_mode) and self._is_new(name, info)
            is_kept = is_new and not _is_same(parent, base, info, record)
        if is_kept:
            folder, last = self._place(f"{self._folder}/{name}")
            os.rename(base, last, src_dir_fd=parent, dst_dir_fd=folder)
            self._names.append(name)
            if self._jobs is not None and (copies := self._jobs[1].moved(name, self._folder)):
                records.keep_copies(self._project, copies)

    @property
    def kept(self) -> Optional[Kept]:
        names = tuple([path_to_wire(name) for name in self._names[:MAX_KEPT]])
        return Kept(len(self._names), names) if names else None

    def _is_new(self, name: str, info: os.stat_result) -> bool:
        """Whether a job may have written a file, and nobody has pulled it since."""
        if self._jobs is None:
            self._jobs = phases.first_began(), records.results(self._project)
        began, results = self._jobs
        written = info.st_ctime_ns
        if results.origin(name, info) == records.PUT_BACK:
            return False
        return 0 < began <= written and not results.is_pulled(name, written)

    def _has_new_files(self, parent: int, base: str, name: str) -> bool:
        top = f"/proc/self/fd/{parent}/{base}"
        for folder, folders, names in os.walk(top):
            folders[:] = [one for one in folders if one not in CACHES]
            for one in names:
                path = os.path.join(folder, one)
                with contextlib.suppress(OSError):
                    info = os.lstat(path)
                    if stat.S_ISREG(info.st_mode) and self._is_new(name + path[len(top) :], info):
                        return True
        return False


def set_aside(project: Path, names: Iterable[str]) -> list[str]:
    """Move files or folders of the project there, and return those that were moved; copies stay known as
    such. A file that a rank begins to write at that moment keeps its place. Raises OSError."""
    results, folder = records.results(project), _folder_name()
    moved, copies = [], dict[str, records.Origin]()
    for name in names:
        path, target = project / name, project / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            before = os.lstat(path)
            os.rename(path, target)
            after = os.lstat(target)
            if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
                os.rename(target, path)
                continue
            moved.append(name)
            copies |= results.moved(name, folder)
    if copies:
        records.keep_copies(project, copies)
    return moved


def _folder_name() -> str:
    return f"{REPLACED}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def _is_same(parent: int, base: str, info: os.stat_result, record: Optional[FileRecord]) -> bool:
    with contextlib.suppress(OSError):  # it may be readable for another user only
        if record is not None and record.size == info.st_size:
            return known_of(open_file(parent, base)).digest == record.digest.hex()
    return False
