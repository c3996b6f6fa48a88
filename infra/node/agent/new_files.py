"""`new_files`: list the files that jobs wrote into the project and that were not pulled yet.

A new file is recognised by its ctime, which neither the job nor a tool that preserves times can set. It is compared with
the ctime of a file that the agent creates: both come from the file system's clock, which may lag behind time.time().
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from agent import files, phases, store
from agent.pulled import pulled_times
from agent.synced import Synced
from cloudddp.agent.protocol.results import (
    MAX_PLACES,
    JobFiles,
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
OUTPUTS, OTHERS = "outputs", "others"


class NewFile(NamedTuple):
    """`place` is the output that contains it, or the topmost of its parent folders that no sync created."""

    ctime: int  # ns
    kind: str  # OUTPUTS or OTHERS
    place: str
    size: int


Places = dict[str, list[int]]  # place -> [files, bytes]


def step(request: NewFilesRequest) -> NewFilesReply:
    project = store.project_folder(request.project)
    now = _file_clock()
    folders = [f for f in phases.job_folders() if phases.was_started(f)]
    chosen = [f for f in folders if request.job in ("", f.name)]
    begins = sorted((_began_at(f), f.name) for f in chosen)
    found: dict[str, dict[str, Places]] = {}
    complete = True
    if begins:
        scan = Scan(project, request.outputs, request.scratch, begins[0][0])
        for new in scan:
            job = [name for began, name in begins if began <= new.ctime][-1]
            kinds = found.setdefault(job, {OUTPUTS: {}, OTHERS: {}})
            place = kinds[new.kind].setdefault(new.place, [0, 0])
            place[0] += 1
            place[1] += new.size
        complete = not scan.late
    listed = [
        JobFiles(job, _summary(kinds[OUTPUTS]), _summary(kinds[OTHERS]))
        for job, kinds in sorted(found.items())
    ]
    running = [job for job in phases.running_jobs() if request.job in ("", job)]
    return NewFilesReply(
        time_ns=now,
        complete=complete,
        rank_zero=any((f / "ranks" / "0.json").exists() for f in chosen),
        running=tuple(running[-MAX_PLACES:]),
        jobs=tuple(listed[-MAX_PLACES:]),
    )


def _ctime(path: Path) -> int:
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def _began_at(folder: Path) -> int:
    return _ctime(folder / phases.BEGAN) or _ctime(folder / phases.JOB_FILE)


def first_began() -> Optional[int]:
    """Return when the first job that is known here began, by the file system's clock, or None."""
    return min((_began_at(f) for f in phases.job_folders() if phases.was_started(f)), default=None)


def written_by_jobs(project: Path) -> Iterator[str]:
    """Yield the files, and the topmost folders, that jobs wrote in the project; a name of a folder ends with '/'."""
    began = first_began()
    if began is not None:
        for new in Scan(project, (), (), began, pulled_too=True):
            yield new.place


def _file_clock() -> int:
    """Return the time by the file system's clock, in ns since the epoch."""
    path = store.ROOT / f".clock-{os.getpid()}"
    try:
        store.create_root()
        path.touch()
        return _ctime(path)
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
    """Yields each new file of a project; `late` says that the time limit was reached."""

    def __init__(
        self,
        folder: Path,
        outputs: Sequence[str],
        scratch: Sequence[str],
        since: int,
        *,
        pulled_too: bool = False,
    ) -> None:
        self.folder, self.since = folder, since
        self.outputs = [os.path.normpath(name) for name in outputs]
        self.scratch = frozenset(os.path.normpath(name) for name in scratch)
        self.manifest = Synced(folder).recorded
        self.synced = {str(parent) for name in self.manifest for parent in Path(name).parents}
        self.pulled = {} if pulled_too else pulled_times(folder)
        self.late = False

    def __iter__(self) -> Iterator[NewFile]:
        deadline = time.monotonic() + SCAN_SECONDS
        waiting = [""]
        while waiting and not self.late:
            below = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(str(self.folder / below)) as entries:
                for entry in entries:
                    name = f"{below}/{entry.name}" if below else entry.name
                    self.late = self.late or time.monotonic() > deadline
                    if (
                        entry.name in CACHES
                        or entry.name.endswith((".pyc", files.TEMPORARY))
                        or name in self.scratch
                    ):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        with contextlib.suppress(OSError):
                            yield from self._if_new(name, entry.stat(follow_symlinks=False))

    def _if_new(self, name: str, info: os.stat_result) -> Iterator[NewFile]:
        written = info.st_ctime_ns
        parents = [name, *map(str, Path(name).parents)]  # the last is "."
        if written < self.since or any(written < self.pulled.get(p, 0) for p in parents):
            return
        if name in self.manifest and files.describe(self.folder / name) == self.manifest[name]:
            return  # a sync has written it
        output = next((out for out in self.outputs if out in parents), None)
        if output is not None:
            yield NewFile(written, OUTPUTS, output, info.st_size)
            return
        unsynced = [p for p in parents[1:] if p not in self.synced and p != "."]
        yield NewFile(written, OTHERS, f"{unsynced[-1]}/" if unsynced else name, info.st_size)
