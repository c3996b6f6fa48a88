"""`new_files`: list the files that jobs wrote into the project and that were not pulled yet.

A new file is recognised by its ctime, which neither the job nor a tool that preserves times can set. It is compared with
the ctime of a file that the agent creates: both come from the file system's clock, which may lag behind time.time().
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Optional

from agent import files, phases, received, store
from agent.pulled import read_record
from agent.selection import NewFile, choose
from agent.synced import Synced
from agent.tree import Found, LeftOut, Tree
from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.results import (
    MAX_PLACES,
    JobFiles,
    LeftFile,
    NewFiles,
    NewFilesReply,
    NewFilesRequest,
    NewPath,
)

REQUEST = NewFilesRequest
CACHES = frozenset(
    ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".git", ".venv", "venv")
)  # fmt: skip
SCAN_SECONDS = 10.0  # the longest that the search may take


Places = dict[str, list[int]]  # place -> [files, bytes]


def step(request: NewFilesRequest) -> NewFilesReply:
    project = store.project_folder(request.project)
    now = _file_clock()
    folders = [f for f in phases.job_folders() if phases.was_started(f)]
    chosen = [f for f in folders if request.job in ("", f.name)]
    begins = sorted((phases.began_at(f), f.name) for f in chosen)
    found: dict[str, tuple[Places, Places]] = {}  # job -> those that a pull takes, and others
    complete = True
    left: dict[str, str] = {}
    if begins:
        scan = Scan(project, request.outputs, request.scratch, begins[0][0], present=request.present)
        for new, is_taken in _taken(scan, request.limit):
            job = [name for began, name in begins if began <= new.ctime][-1]
            place = found.setdefault(job, ({}, {}))[not is_taken].setdefault(new.place, [0, 0])
            place[0] += 1
            place[1] += new.size
        complete = not scan.late
        left = scan.left
    listed = [JobFiles(job, *map(_summary, places)) for job, places in sorted(found.items())]
    running = [job for job in phases.running_jobs() if request.job in ("", job)]
    return NewFilesReply(
        time_ns=now,
        complete=complete,
        rank_zero=any((f / "ranks" / "0.json").exists() for f in chosen),
        running=tuple(running[-MAX_PLACES:]),
        jobs=tuple(listed[-MAX_PLACES:]),
        left=tuple([LeftFile(name, why[:MAX_REASON]) for name, why in sorted(left.items())[:MAX_PLACES]]),
    )


def _taken(scan: Scan, limit: int) -> Iterator[tuple[NewFile, bool]]:
    """Yield each new file, and whether a pull takes it."""
    if scan.outputs:
        yield from ((new, new.place in scan.outputs) for new in scan)
        return
    taken, left = choose(list(scan), limit)
    yield from ((new, True) for new in taken)
    yield from ((new, False) for files in left.values() for new in files)


def was_written_by_jobs(project: Path) -> bool:
    """Return whether jobs wrote anything in the project, on this node or, where it was copied from there, on another one."""
    began = phases.first_began()
    return bool(began) and any(True for _ in Scan(project, (), (), began, again=0))


def _file_clock() -> int:
    """Return the time by the file system's clock, in ns since the epoch."""
    path = store.ROOT / f".clock-{os.getpid()}"
    try:
        store.create_root()
        path.touch()
        return phases.ctime(path)
    except OSError:  # the disk is full
        return time.time_ns() - 100_000_000
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _summary(places: Places) -> NewFiles:
    largest = sorted(places.items(), key=lambda item: -item[1][1])[:MAX_PLACES]
    return NewFiles(
        files=sum(count for count, _ in places.values()),
        size=sum(size for _, size in places.values()),
        paths=tuple([NewPath(name, count, size) for name, (count, size) in largest]),
    )


class Scan:
    """Yields each new file of a project; `late` says that the limit of `seconds` was reached. `left` names what a pull has left
    out and what cannot be read, and why. Files that were pulled count again if they were written after `again` (ns); copies of
    what the instances in `present` wrote do not count."""

    def __init__(
        self, folder: Path, outputs: Sequence[str], scratch: Sequence[str], since: int, *,
        again: Optional[int] = None, seconds: float = SCAN_SECONDS, left_out: Optional[LeftOut] = None,
        present: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._copies = received.read(folder)
        self._present = frozenset(present)
        self.folder, self.since, self.again, self.seconds = folder, since, again, seconds
        self.outputs = [os.path.normpath(name) for name in outputs]
        self.scratch = frozenset(os.path.normpath(name) for name in scratch)
        self.manifest = Synced(folder).recorded
        self.synced = {str(parent) for name in self.manifest for parent in Path(name).parents}
        self.record = read_record(folder)
        self.left = {name: why for name, why in self.record.left.items() if os.path.lexists(folder / name)}
        self._renamed: dict[str, int] = {}  # folder -> its ctime
        self.late = False
        self._deadline = math.inf
        self._report = left_out or self._left_out

    def __iter__(self) -> Iterator[NewFile]:
        self._deadline = time.monotonic() + self.seconds
        tree = Tree(str(self.folder), ["."], self._report, since=self.since, skip=self._is_skipped)
        with contextlib.suppress(OSError):
            for one in tree.below("."):
                if self.late:
                    return
                if not stat.S_ISDIR(one.info.st_mode):
                    yield from self._if_new(one)
                elif one.info.st_ctime_ns > one.info.st_mtime_ns:
                    self._renamed[one.name] = one.info.st_ctime_ns

    def _left_out(self, name: str, reason: str, *, counts: bool = True) -> None:
        if counts:
            self.left.setdefault(name, reason)

    def _is_skipped(self, name: str) -> bool:
        self.late = self.late or time.monotonic() > self._deadline
        if self.late:
            return True
        last = name.rpartition("/")[2]
        return last in CACHES or last.endswith((".pyc", files.TEMPORARY)) or name in self.scratch

    def _if_new(self, found: Found) -> Iterator[NewFile]:
        name = found.name
        parents = [name, *map(str, Path(name).parents)]  # the last is "."
        # A rename of a folder leaves the times of the files in it.
        written = max(found.info.st_ctime_ns, *(self._renamed.get(p, 0) for p in parents))
        pulled = self.record.is_pulled(name, written)
        if written < self.since or (pulled and (self.again is None or written < self.again)):
            return
        if name in self.manifest and files.describe(self.folder / name) == self.manifest[name]:
            return  # a sync has written it
        if self._copies.origin(name, found.info) in self._present:
            return
        place = next((out for out in self.outputs if out in parents), "")
        if not place:
            unsynced = [p for p in parents[1:] if p not in self.synced and p != "."]
            place = f"{unsynced[-1]}/" if unsynced else name
        yield NewFile(written, place, found, pulled)
