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
from typing import Optional

from agent.files import records
from agent.files.project_lock import ProjectLock
from agent.files.records import Writer
from agent.files.sync_record import Synced
from agent.node.link import LinkError
from agent.sync.project_writer import ProjectWriter, remove, to_disk
from cloudddp.agent.protocol.checkpoints import Part, writer_of
from cloudddp.agent.protocol.file_steps import ReceiveReply
from cloudddp.agent.protocol.manifest import LINK, Entry
from cloudddp.agent.protocol.transfer import FileHead, Listing, PartialFile, Wants
from cloudddp.agent.protocol.writing import Incoming, known_of

DISK_RESERVE = 64 << 20  # bytes that stay free


class ProjectUpdate:
    """The project's files while they are changed: the target of a Receiver. Without what was `synced` these
    are results, which no sync records or deletes, with the sharded checkpoints `put_back`."""

    def __init__(
        self,
        folder: Path,
        listing: Listing,
        lock: ProjectLock,
        synced: Optional[Synced],
        put_back: Sequence[Part] = (),
    ) -> None:
        self._folder, self._lock, self._synced, self._put_back = folder, lock, synced, put_back
        self.files = listing.entries()  # their names were checked when the listing was decoded
        self._old = synced.current() if synced else {}  # what syncs have written, and nobody has changed
        self._delete = sorted(self._old.keys() - dict(self.files).keys())
        self.wanted: list[int] = []  # regular files whose contents may be needed
        self._links: list[int] = []
        self._modes: list[int] = []  # files of which only the mode differs
        # What another project has sent may have the same size and time, and other contents.
        old = {} if synced and synced.is_foreign else self._old
        for index, (name, entry) in enumerate(self.files):
            known = old.get(name)
            if known == entry:
                continue
            if entry.kind == LINK:
                self._links.append(index)
            elif known is not None and known._replace(mode=entry.mode) == entry:
                self._modes.append(index)
            else:
                self.wanted.append(index)
        # Of files in their place, with their ctime (ns).
        self._present: dict[int, tuple[PartialFile, int]] = {}
        self._came: dict[int, FileHead] = {}
        self._gone: set[int] = set()
        self._has_started = False

    @functools.cached_property
    def _writer(self) -> ProjectWriter:
        return ProjectWriter(self._folder, self._old)

    def wants(self, missing: Iterable[int]) -> Wants:
        """Return what of the `missing` files this node lacks. Changes nothing in the project."""
        missing, known = tuple(missing), {}
        for index in missing:
            name, entry = self.files[index]
            self._present.pop(index, None)  # of it a part may have come from another node since
            found = self._writer.known(name) or self._in_place(index)
            if found is not None and found.size <= entry.size:
                known[index] = found
        return Wants(missing, known, len(self._delete))

    def check_space(self, wants: Wants) -> None:
        """Raise SystemExit where the disk has no space for what is wanted. What was begun of other files goes
        first."""
        if not wants.files:  # nothing is made on a disk that may be full
            return
        self._writer.forget(self.files[index][0] for index in wants.files)
        size = sum(self.files[index][1].size for index in wants.files)
        # A file in its place of the right size is taken for the right one: if it is not, writing may fail.
        size -= sum(one.size for one in wants.known.values())
        free = shutil.disk_usage(str(self._folder)).free
        if size and free < size + DISK_RESERVE:
            raise SystemExit(f"not enough disk space for the project: {free >> 20} MiB free")

    def _in_place(self, index: int) -> Optional[PartialFile]:
        """Return what is known of a file that may have the same contents, and another time."""
        name, entry = self.files[index]
        with contextlib.suppress(OSError):
            descriptor = self._writer.present(name)
            info = os.fstat(descriptor)
            if 0 < info.st_size == entry.size:
                self._present[index] = known_of(descriptor), info.st_ctime_ns
                return self._present[index][0]
            os.close(descriptor)
        return None

    def start(self) -> None:
        """Begin to change the project's folder, once."""
        changed = [*self.wanted, *self._links, *self._modes]
        if self._has_started or not (changed or self._delete):
            return
        self._has_started = True
        self._lock.changes()
        if self._synced:
            self._synced.begin(dict(self.files[index] for index in changed))
        else:
            self._note_origins()
        remove(self._folder, {name: self._old[name] for name in self._delete})
        for index in self._links:
            name, entry = self.files[index]
            self._writer.link(name, entry.target, None if self._synced else entry.mtime_ns)
        for index in self._modes:
            name, entry = self.files[index]
            self._writer.touch(name, entry.mode, entry.mtime_ns)

    # -- the target ------------------------------------------------------------------------------------------

    def begin(self, number: int, offset: int) -> Incoming:
        return self._writer.begin(self.files[number][0], offset, in_place=number in self._present)

    def finish(self, head: FileHead, incoming: Incoming) -> None:
        self._writer.finish(self.files[head.number][0], head, incoming, head.mode)
        self._came[head.number] = head

    def confirm(self, head: FileHead) -> bool:
        name = self.files[head.number][0]
        known, ctime_ns = self._present.get(head.number, (None, 0))
        if known != (head.size, head.digest.hex()):
            return False
        with contextlib.suppress(OSError):
            if os.lstat(self._folder / name).st_ctime_ns == ctime_ns:
                self._writer.touch(name, head.mode, head.mtime_ns)
                self._came[head.number] = head
                return True
        raise SystemExit(f"{name!r} was changed on this node while it was synced; repeat the command")

    def gone(self, head: FileHead) -> None:
        """Delete a file that was deleted on the laptop since it was listed. Raises LinkError where another
        node does not have it."""
        name = self.files[head.number][0]
        if head.missing:
            raise LinkError(f"it does not have {name!r}")
        self._gone.add(head.number)
        if name in self._old:
            remove(self._folder, {name: self._old[name]})

    def complete(self) -> ReceiveReply:
        """Record the manifest that the project has now, once it is on the disk."""
        kept = None
        with contextlib.suppress(OSError):  # a full disk has no room for the folder of what was begun
            self._writer.close(complete=True)
            kept = self._writer.kept
        if self._has_started:
            to_disk(self._folder)
        if self._synced and self._has_started:
            self._synced.record(
                dict(self._now(index) for index in range(len(self.files)) if index not in self._gone)
            )
        elif self._synced:
            self._synced.take_over()
        else:
            self._note_origins()
        return ReceiveReply(self._lock.version, kept)

    def _note_origins(self) -> None:
        """Note that the laptop has these results, so that they do not wait to be pulled: before they are
        written, and as they came."""
        found = {}
        for name, entry in map(self._now, range(len(self.files))):
            size, writer = entry.size or len(os.fsencode(entry.target)), writer_of(name, self._put_back)
            found[name] = Writer(records.PUT_BACK, *writer, size, entry.mtime_ns)
        records.keep_copies(self._folder, found)

    def _now(self, index: int) -> tuple[str, Entry]:
        """Return a file as it is now: one may have changed on the laptop since it was listed."""
        (name, entry), head = self.files[index], self._came.get(index)
        if head is None:
            return name, entry
        return name, entry._replace(mode=head.mode, size=head.size, mtime_ns=head.mtime_ns)
