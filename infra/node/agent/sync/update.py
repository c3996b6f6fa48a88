"""What a node does with the frames of a sync, wherever they come from: it compares the listing with its
files, and changes these.

What is about to be written is recorded first, and the new manifest last (files/sync_record.py): after an
interrupted transfer the next sync sends what is missing, and deletes what arrived and is no longer wanted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Optional

from agent.files.paths import remove_temporaries
from agent.files.project_lock import ProjectLock
from agent.files.sync_record import Synced
from agent.sync.plan import SyncPlan, plan
from agent.sync.project_writer import Partials, ProjectWriter
from agent.sync.relay import Large, Relay
from agent.sync.sources import SourceLost, report
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.file_steps import WRITING, ReceiveEvent, ReceiveReply
from cloudddp.agent.protocol.transfer import Frame, Record, Wants

DISK_RESERVE = 64 << 20  # bytes that stay free


class ProjectUpdate:
    """The project's files while they are changed. `relay` passes on what arrives. `adds`: these are results,
    which no sync records or deletes."""

    def __init__(
        self, folder: Path, relay: Relay, lock: ProjectLock, origin: str = "", *, adds: bool = False
    ) -> None:
        self._folder, self._relay, self._lock, self._adds = folder, relay, lock, adds
        self._synced = Synced(folder, origin)
        self._plan: Optional[SyncPlan] = None
        self._writer: Optional[ProjectWriter] = None
        self._large: Optional[Large] = None  # the file that comes in parts
        self._records: dict[int, Record] = {}  # of the files that were written
        self.again: list[int] = []  # files whose beginning here was wrong: the laptop has to send them whole
        self._restarted: set[int] = set()
        self._is_changed = False  # files of this node
        self.received = 0  # bytes in frames
        self.worked = 0  # bytes that were hashed besides, and 1 for each other change of a file

    @property
    def plan(self) -> SyncPlan:
        assert self._plan is not None  # noqa: S101  it is made with the first frame
        return self._plan

    def compare(self, frame: Frame) -> Wants:
        """Return what this node lacks of the listing, which every source sends first. Nothing is changed
        yet."""
        if self._plan is None:
            listing = transfer.read_listing(frame)
            self._relay.listed(frame, listing)
            self._plan = plan(self._folder, None if self._adds else self._synced, listing)
            here = {*range(len(self.plan.names))}
            self._relay.present(here.difference(self.plan.wanted, self.plan.move, self.plan.touch))
        made, missing = self.plan, self.missing()
        self._leave()
        begun = Partials(self._folder)
        large = [index for index in made.large if index not in self._records]
        sizes = {str(index): begun.size(made.names[index], made.entries[index]) for index in large}
        offsets = {index: size for index, size in sizes.items() if size}
        everything = len(missing) == made.regular
        return Wants(everything, () if everything else tuple(missing), offsets, made.size, len(made.delete))

    def missing(self) -> list[int]:
        return [index for index in self.plan.wanted if index not in self._records]

    def _prepare(self) -> None:
        """Begin to change the project's folder, once."""
        if self._writer is not None:
            return
        made = self.plan
        free = shutil.disk_usage(str(self._folder)).free
        if made.size and free < made.size + DISK_RESERVE:
            raise SystemExit(f"not enough disk space for the project: {free >> 20} MiB free")
        self._is_changed = made.is_change
        if made.is_change:
            self._lock.changes()
        # The probe does that, too, unless its disk was full.
        remove_temporaries(self._folder, self._synced.interrupted_folders)
        if not self._adds:
            self._synced.begin(made.changed)
        writer = ProjectWriter(self._folder, self._has_worked, made.old)
        writer.partials.forget({made.names[index] for index in made.large})
        for index, name in made.move.items():  # first: what is deleted or replaced later makes way for them
            writer.move(name, made.names[index], made.entries[index])
        writer.remove([*made.delete, *made.move.values()])  # the latter for folders that are empty now
        for index in made.links:
            writer.link(made.names[index], made.entries[index].target)
        for index in made.touch:
            writer.touch(made.names[index], made.entries[index])
        self._relay.present((*made.move, *made.touch))
        self._writer = writer

    def take(self, frame: Frame, *, is_direct: bool) -> None:
        """Write what has arrived. `is_direct`: from the laptop. Raises SourceLost, ProtocolError."""
        self._prepare()
        self.received += len(frame.raw)
        if frame.kind == transfer.BATCH:
            self._take_batch(frame)
        elif frame.kind == transfer.PART:
            self._take_part(frame)
        elif frame.kind == transfer.END:
            self._take_end(frame, is_direct=is_direct)

    def _has_worked(self, size: int) -> None:
        self.worked += size

    def _take_batch(self, frame: Frame) -> None:
        assert self._writer is not None  # noqa: S101  _prepare was called
        made = self.plan
        for record, contents in transfer.read_batch(frame):
            if record.missing or record.number not in made.wanted or record.number in self._records:
                continue
            if record.deleted:
                self._forget(record.number)
                continue
            self._writer.small(made.names[record.number], record, contents)
            self._records[record.number] = record
        self._relay.arrived(frame)

    def _forget(self, index: int) -> None:
        """Delete a file here that was deleted on the laptop since it was listed."""
        assert self._writer is not None  # noqa: S101  _prepare was called
        name = self.plan.names[index]
        del self.plan.wanted[index], self.plan.new[name]
        if name in self.plan.old:
            self._writer.remove([name])

    def _take_part(self, frame: Frame) -> None:
        index, offset, data = transfer.read_part(frame)
        if index not in self.plan.wanted or index in self._records:
            return
        large = self._begun(index)
        if offset == 0 and large.incoming.written:  # the sender starts again
            large.incoming.discard()
            self._leave()
            self._restarted.add(index)
            large = self._begun(index)
        large.incoming.write(offset, data)
        self._relay.grown()

    def _begun(self, index: int) -> Large:
        """Return the file that comes in parts, opened when the first of them arrives."""
        if self._large is None:
            assert self._writer is not None  # noqa: S101  _prepare was called
            incoming = self._writer.continued(self.plan.names[index], self.plan.entries[index])
            self._large = self._relay.begin(index, incoming, again=index in self._restarted)
        if self._large.index != index:
            raise SourceLost("too many files were begun at the same time")
        return self._large

    def _leave(self, end: Optional[bytes] = None) -> None:
        """Close the file that comes in parts. `end`: its last frame, if it is complete."""
        if self._large is not None:
            self._relay.ended(self._large, end)
            self._large = None

    def _take_end(self, frame: Frame, *, is_direct: bool) -> None:
        record = transfer.read_end(frame)
        if record.number not in self.plan.wanted or record.number in self._records:
            return
        good = self._begun(record.number).incoming.finish(record, record.mode)
        self._leave(frame.raw if good else None)
        if not good and is_direct and record.number not in self._restarted:
            # Its beginning came from another node, or from an earlier sync.
            self._restarted.add(record.number)
            self.again.append(record.number)
            return
        if not good:
            raise SourceLost(f"{self.plan.names[record.number]!r} arrived with other contents than announced")
        self._records[record.number] = record

    def finish(self) -> ReceiveReply:
        """Record the manifest that the project has now."""
        made = self.plan
        if self._is_changed:
            report(ReceiveEvent(received=self.received, stage=WRITING))
            if self._writer is not None:
                self._writer.to_disk()
            made.take(self._records)
        if made.is_change and not self._adds:
            self._synced.record(made.new, made.digests)
        elif not self._adds:
            self._synced.take_over()
        return ReceiveReply(
            written=len(self._records) + len(made.links),
            deleted=len(made.delete),
            kept=len(made.touch) + len(made.move),
            received=self.received,
            version=self._lock.version,
            replaced=self._writer.replaced.kept if self._writer is not None else None,
        )
