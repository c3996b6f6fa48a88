"""The files of a project that jobs wrote: what is there, without what syncs wrote, what was pulled, and
copies of other nodes.

A new file is recognised by its ctime, which neither the job nor a tool that preserves times can set. It is
compared with the ctime of a file that the agent creates: both come from the file system's clock, which may
lag behind time.time().
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

from agent.files import paths, records, shared
from agent.files.selection import NewFile
from agent.files.sync_record import Synced
from agent.files.tree import Found, OnSkipped, Tree
from agent.jobs import phases
from cloudddp.agent.protocol.checkpoints import is_shard
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.writing import TEMPORARY

CACHES = frozenset(
    (
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".ipynb_checkpoints",
        ".git",
        ".venv",
        ".conda",
        "venv",
    )
)
SCAN_SECONDS = 10.0  # the longest that the search may take


class Scan:
    """Yields each new file of a project; `late` says that the limit of `seconds` was reached. `left` names
    what a pull has left out and what cannot be read, and why, `shards` the folders with shards of a
    checkpoint.

    Files that were pulled count again if they were written after `again` (ns); copies of what the instances
    in `present` wrote do not count.
    """

    def __init__(
        self,
        folder: Path,
        outputs: Sequence[str],
        scratch: Sequence[str],
        since: int,
        *,
        again: Optional[int] = None,
        seconds: float = SCAN_SECONDS,
        left_out: Optional[OnSkipped] = None,
        present: Collection[str] = (),
    ) -> None:
        self._present = frozenset(present)
        self.folder, self.since, self.again, self.seconds = folder, since, again, seconds
        self.outputs = [os.path.normpath(name) for name in outputs]
        self.scratch = frozenset(os.path.normpath(name) for name in (*scratch, *shared.places().elsewhere))
        self.manifest = Synced(folder).recorded
        self.synced = {str(parent) for name in self.manifest for parent in Path(name).parents}
        self._results = records.results(folder)
        self.left = {name: why for name, why in self._results.left.items() if os.path.lexists(folder / name)}
        self._renamed: dict[str, int] = {}  # folder -> its ctime
        self.late = False
        self.shards: set[str] = set()  # folders that have some
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
        return last in CACHES or last.endswith((".pyc", ".egg-info", TEMPORARY)) or name in self.scratch

    def _if_new(self, found: Found) -> Iterator[NewFile]:
        name = found.name
        if is_shard(name) and not f"{name}/".startswith(f"{REPLACED}/"):
            self.shards.add(os.path.dirname(name))
        parents = [name, *map(str, Path(name).parents)]  # the last is "."
        # A rename of a folder leaves the times of the files in it.
        written = max(found.info.st_ctime_ns, *(self._renamed.get(p, 0) for p in parents))
        is_pulled = self._results.is_pulled(name, written)
        if written < self.since or (is_pulled and (self.again is None or written < self.again)):
            return
        if name in self.manifest and paths.describe(self.folder / name) == self.manifest[name]:
            return  # a sync has written it
        if self._results.origin(name, found.info) in (records.PUT_BACK, *self._present):
            return
        place = next((out for out in self.outputs if out in parents), "")
        if not place:
            unsynced = [p for p in parents[1:] if p not in self.synced and p != "."]
            place = f"{unsynced[-1]}/" if unsynced else name
        yield NewFile(written, place, found, is_pulled)


def below(folder: Path, names: Sequence[str], left_out: OnSkipped, *, every: bool = False) -> Iterator[Found]:
    """Yield what is at or below these paths in a folder. `every`: also files behind links that no job wrote,
    and shared folders that count on another node."""
    roots = [os.path.normpath(name) for name in names]
    since = 0 if every else phases.first_began()
    elsewhere = () if since == 0 else shared.places().elsewhere
    tree = Tree(str(folder), roots, left_out, since=since, skip=elsewhere.__contains__)
    for root in roots:
        if shared.is_below(root, elsewhere):
            continue
        if os.path.lexists(folder / root):
            yield from tree.below(root)
        else:
            left_out(root, "", counts=False)


def was_written_by_jobs(project: Path) -> bool:
    """Return whether jobs wrote anything in the project, on this node or, where it was copied from there, on
    another one; or may have, in more files than can be looked at."""
    began = phases.first_began()
    scan = Scan(project, (), (), began, again=0)
    return bool(began) and (any(True for _ in scan) or scan.late)
