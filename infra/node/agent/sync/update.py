"""What a node does in a sync, wherever the files come from: it compares the listing with its files, and
changes these.

What is about to be written is recorded first, and the new manifest last (files/sync_record.py): after an
interrupted transfer the next sync sends what is missing, and deletes what arrived and is no longer wanted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from agent.files import records
from agent.files.project_lock import ProjectLock
from agent.files.records import Origin
from agent.files.sync_record import Synced
from agent.node.link import LinkError
from agent.sync.plan import plan
from agent.sync.project_writer import ProjectWriter, remove, to_disk
from cloudddp.agent.protocol.checkpoints import Part, writer_of
from cloudddp.agent.protocol.file_steps import ReceiveReply
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import Known, Listing, Record, Wants
from cloudddp.agent.protocol.writing import Incoming, known_of

DISK_RESERVE = 64 << 20  # bytes that stay free


class _Present(NamedTuple):
    """A file in its place that may have the contents that are wanted, as it was at a ctime (ns)."""

    known: Known
    ctime_ns: int


class ProjectUpdate:
    """The project's files while they are changed: the target of a Receiver. Without what was `synced` these
    are results, which no sync records or deletes."""

    def __init__(self, folder: Path, listing: Listing, lock: ProjectLock, synced: Optional[Synced]) -> None:
        self._folder, self._lock, self._synced = folder, lock, synced
        self._plan = plan(listing, synced)
        self.files, self.wanted = self._plan.files, self._plan.wanted
        self._present: dict[int, _Present] = {}
        self._came: dict[int, Record] = {}
        self._gone: set[int] = set()
        self._has_started = False

    @functools.cached_property
    def _writer(self) -> ProjectWriter:
        return ProjectWriter(self._folder, self._plan.old)

    def wants(self, missing: Iterable[int]) -> Wants:
        """Return what of the `missing` files this node lacks. Changes nothing."""
        missing, known = tuple(missing), {}
        for index in missing:
            name, entry = self.files[index]
            self._present.pop(index, None)  # of it a part may have come from another node since
            found = self._writer.known(name) or self._in_place(index)
            if found is not None and found.size <= entry.size:
                known[index] = found
        size = sum(self.files[index][1].size for index in missing) - sum(one.size for one in known.values())
        return Wants(missing, known, size, len(self._plan.delete))

    def check_space(self, size: int) -> None:
        """Raise SystemExit where the disk has no space for so many bytes."""
        free = shutil.disk_usage(str(self._folder)).free
        if size and free < size + DISK_RESERVE:
            raise SystemExit(f"not enough disk space for the project: {free >> 20} MiB free")

    def _in_place(self, index: int) -> Optional[Known]:
        """Return what is known of a file that may have the same contents, and another time."""
        name, entry = self.files[index]
        with contextlib.suppress(OSError):
            descriptor = self._writer.present(name)
            info = os.fstat(descriptor)
            if 0 < info.st_size == entry.size:
                self._present[index] = _Present(known_of(descriptor), info.st_ctime_ns)
                return self._present[index].known
            os.close(descriptor)
        return None

    def start(self) -> None:
        """Begin to change the project's folder, once."""
        made = self._plan
        if self._has_started or not (made.changed or made.delete):
            return
        self._has_started = True
        self._lock.changes()
        if self._synced:
            self._synced.begin(made.changed)
        remove(self._folder, made.delete)
        for index in made.links:
            name, entry = self.files[index]
            self._writer.link(name, entry.target)
        for index in made.modes:
            name, entry = self.files[index]
            self._writer.touch(name, entry.mode, entry.mtime_ns)

    # -- the target ------------------------------------------------------------------------------------------

    def begin(self, number: int, offset: int) -> Incoming:
        name = self.files[number][0]
        if not offset or number not in self._present:
            return self._writer.begin(name, offset)
        descriptor = self._writer.present(name)
        try:
            return self._writer.begin(name, offset, descriptor)
        finally:
            os.close(descriptor)

    def finish(self, record: Record, incoming: Incoming) -> None:
        self._writer.finish(self.files[record.number][0], record, incoming, record.mode)
        self._came[record.number] = record

    def confirm(self, record: Record) -> bool:
        name, present = self.files[record.number][0], self._present.get(record.number)
        if present is None or present.known != (record.size, record.digest.hex()):
            return False
        with contextlib.suppress(OSError):
            descriptor = self._writer.present(name)
            is_same = os.fstat(descriptor).st_ctime_ns == present.ctime_ns
            os.close(descriptor)
            if is_same:
                self._writer.touch(name, record.mode, record.mtime_ns)
                self._came[record.number] = record
                return True
        return False

    def gone(self, record: Record) -> None:
        """Delete a file that was deleted on the laptop since it was listed. Raises LinkError where another
        node does not have it."""
        name = self.files[record.number][0]
        if record.missing:
            raise LinkError(f"it does not have {name!r}")
        self._gone.add(record.number)
        if name in self._plan.old:
            remove(self._folder, [name])

    def complete(self, put_back: Sequence[Part]) -> ReceiveReply:
        """Record the manifest that the project has now, once it is on the disk; or where results come from,
        by these sharded checkpoints."""
        kept = None
        with contextlib.suppress(OSError):  # a full disk has no room for the folder of what was begun
            self._writer.close(complete=True)
            kept = self._writer.replaced.kept
        if self._has_started:
            to_disk(self._folder)
        if self._synced and self._has_started:
            self._synced.record(
                dict(self._now(index) for index in range(len(self.files)) if index not in self._gone)
            )
        elif self._synced:
            self._synced.take_over()
        else:  # the laptop has these: they do not wait to be pulled
            records.keep_copies(self._folder, {name: self._origin(name, put_back) for name, _ in self.files})
        return ReceiveReply(self._lock.version, kept)

    def _origin(self, name: str, put_back: Sequence[Part]) -> Optional[Origin]:
        with contextlib.suppress(OSError):
            info = os.lstat(self._folder / name)
            return Origin(records.PUT_BACK, *writer_of(name, put_back), info.st_size, info.st_mtime_ns)
        return None

    def _now(self, index: int) -> tuple[str, Entry]:
        """Return a file as it is now: one may have changed on the laptop since it was listed."""
        (name, entry), record = self.files[index], self._came.get(index)
        if record is None:
            return name, entry
        return name, entry._replace(mode=record.mode, size=record.size, mtime_ns=record.mtime_ns)
