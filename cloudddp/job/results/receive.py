"""Takes what a node sends of its files into the folder of a transfer: new files, and those that were here
already.

A node is not trusted: what no agent sends raises Refused, and with it nothing is kept. Each file is compared
with the hash of the whole file as the agent has read it, so it is never a mix of two versions.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import LeftOut
from cloudddp.agent.protocol.manifest import LINK, path_from_wire
from cloudddp.agent.protocol.transfer import (
    DIGEST,
    MAX_ENTRIES,
    MAX_KNOWN,
    UNSEALED,
    Frame,
    Frames,
    Listing,
    Record,
    Wants,
)
from cloudddp.agent.replies import decode
from cloudddp.files import Folder
from cloudddp.job.results import local_files as here
from cloudddp.job.results.incoming import Incoming
from cloudddp.job.results.local_files import Here, Known
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import FOLDER, Entry, Notes, Refused, Truncated, Unpack

MAX_TEXT = 256 << 20  # bytes of all listings


@dataclass(slots=True)
class Transfer:
    """The state of a transfer, for the display of progress. `done` of `total` bytes are here, of which
    `received` were sent."""

    total: int = 0
    done: int = 0
    received: int = 0


Progress = Callable[[Transfer], None]


@dataclass(slots=True)
class _Open:
    """The file that is being received, with a hash of what is here of it."""

    number: int
    entry: Entry
    written: int
    hasher: Any


class Receive:
    """Feed it what the node sends, and send it what `answer` yields. `target` is where the files will be."""

    def __init__(
        self,
        arrived: Incoming,
        target: Folder,
        roots: Sequence[Parts],
        notes: Notes,
        *,
        node: int,
        progress: Progress = lambda _: None,
    ) -> None:
        self.progressed = time.monotonic()  # when it last sent more than that it works
        self.unchanged = 0  # files in the target that are as on the node
        self.others: dict[str, str] = {}  # path -> another job that wrote the file
        self._arrived, self._notes = arrived, notes
        self._here = Here(arrived.before, target)
        self._files = Unpack(arrived.files, roots, notes, node)
        self._frames = Frames(UNSEALED)
        self._listed = self._text = self._left_out = 0
        self._wanted: dict[int, Entry] = {}  # by index: what has not come yet
        self._known: dict[int, Known] = {}  # of these, what is here of them
        self._open: _Open | None = None
        self._answer = b""  # the frame that says what is wanted
        self._is_answered = self._is_finished = False
        self._transfer, self._progress = Transfer(), progress

    def __enter__(self) -> Receive:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()
        self._here.__exit__()

    def answer(self) -> Iterator[bytes]:
        """Yield what goes to the node: what is wanted, once that is known; b"" before."""
        while not self._answer:
            yield b""
        yield self._answer

    def feed(self, data: bytes) -> None:
        """Take a piece of what the node sends. Raises Refused, OSError, CloudDDPError."""
        try:
            for frame in self._frames.feed(data):
                if frame.kind != transfer.ALIVE:
                    self._take(frame)
                    self.progressed = time.monotonic()
        except (ProtocolError, EOFError) as error:
            raise Refused(str(error)) from None
        self._progress(self._transfer)  # it has sent something, perhaps only that it works

    def feed_notes(self, data: bytes) -> None:
        self._notes.feed(data)
        self._progress(self._transfer)

    def close(self) -> None:
        """Raises Truncated where something is missing."""
        if self._is_finished and not self._frames.is_cut:
            return
        where = f" in the middle of {self._open.entry.name!r}" if self._open else ""
        raise Truncated(f"the stream is truncated{where}")

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if self._is_finished:
            raise Refused("the stream continues after its end")
        if kind == transfer.LEFT_OUT:
            self._leave_out(decode(frame.head, LeftOut))
        elif kind == transfer.LISTING and not self._is_answered:
            self._list(frame)
        elif kind == transfer.DONE and not self._is_answered:
            self._ask()
        elif kind == transfer.BATCH and self._is_answered:
            self._batch(frame)
        elif kind == transfer.PART and self._is_answered:
            self._part(*transfer.read_part(frame))
        elif kind == transfer.END and self._is_answered:
            self._end(transfer.read_end(frame))
        elif kind == transfer.DONE:
            self._finish()
        else:
            raise Refused("it sent a frame that does not belong here")

    def _leave_out(self, one: LeftOut) -> None:
        self._left_out += 1
        if self._left_out > file_steps.MAX_LEFT_OUT + 1:
            raise Refused(f"more than {file_steps.MAX_LEFT_OUT:,} files are left out")
        try:
            name, reason = path_from_wire(one.name), path_from_wire(one.reason)
        except ValueError:
            raise Refused("the name of a file that is left out is not bytes") from None
        self._notes.left_out(name, reason, counts=one.counts)

    # -- what the node has -----------------------------------------------------------------------------------

    def _list(self, frame: Frame) -> None:
        text = transfer.read_listing_text(frame, file_steps.MAX_LEFT_OUT_TEXT)
        self._text += len(text)
        listing = decode(text, Listing, limit=file_steps.MAX_LEFT_OUT_TEXT)
        if len(listing.folders) > file_steps.MAX_LISTED:
            raise Refused("a listing has more folders than files are sent in one")
        entries = listing.entries()
        first, self._listed = self._listed, self._listed + len(entries) + len(listing.modes)
        if self._listed > MAX_ENTRIES or self._text > MAX_TEXT:
            raise Refused(f"there are more than {MAX_ENTRIES:,} files")
        self._listed = first + len(entries)
        jobs = {at: job for job, positions in listing.others.items() for at in positions}
        self.others |= {path_from_wire(path): jobs[at] for at, (path, _) in enumerate(entries) if at in jobs}
        for path, mode in sorted(listing.modes.items()):
            self._files.begin(Entry(path_from_wire(path), FOLDER, 0, mode))
        for number, (path, found) in enumerate(entries, first):
            target = path_from_wire(found.target)
            entry = Entry(path_from_wire(path), found.kind, found.size, found.mode, found.mtime_ns, target)
            if found.kind == LINK:
                self._files.begin(entry)
            else:
                self._compare(number, entry)

    def _compare(self, number: int, entry: Entry) -> None:
        """Decide whether a file has to be sent."""
        path = self._files.checked(entry)
        if not path or self._files.leaves_out(entry, path):
            return
        known = self._here.find(entry, path)
        if known is not None and known.hasher is None:
            self._keep(known)
            return
        self._wanted[number] = entry
        self._transfer.total += entry.size
        if known is not None and len(self._known) < MAX_KNOWN:
            self._known[number] = known

    def _keep(self, known: Known) -> None:
        """Take a file that is complete here: it stays in the target, or joins what has arrived."""
        if known.root is self._arrived.before:
            here.take(known, self._files.parent(known.path))
            return
        self.unchanged += 1

    def _ask(self) -> None:
        self._is_answered = True
        if not self._wanted:
            self._is_finished = True
            self._answer = transfer.frame(UNSEALED, transfer.CLOSE)
            return
        offsets = {str(number): known.size for number, known in self._known.items()}
        digests = {str(number): known.hasher.hexdigest() for number, known in self._known.items()}
        wants = Wants(files=tuple(self._wanted), offsets=offsets, size=self._transfer.total, digests=digests)
        self._answer = wants.frame(UNSEALED)

    # -- contents --------------------------------------------------------------------------------------------

    def _entry(self, number: int) -> Entry:
        """Return the entry of a file that was asked for and has not come."""
        entry = self._wanted.get(number)
        if entry is None:
            raise Refused(f"file {number} was not asked for, or has come before")
        return entry

    def _batch(self, frame: Frame) -> None:
        found = transfer.read_batch(frame)
        if not found:
            raise Refused("it sent contents of no file")
        for record, contents in found:
            self._small(record, contents)

    def _small(self, record: Record, contents: memoryview) -> None:
        """Take a file as a whole, or learn that it is missing."""
        entry = self._entry(record.number)
        if self._open is not None:
            if not record.missing or self._open.number != record.number:
                raise Refused(f"{self._open.entry.name!r} has no end")
            self._files.discard()
            self._open = None
        elif not record.missing:
            self._files.begin(entry._replace(size=record.size))
            self._write(contents)
            self._complete(entry, record)
        del self._wanted[record.number]

    def _part(self, number: int, offset: int, data: bytes) -> None:
        if not data:
            raise Refused("it sent a part without contents")
        if self._open is None:
            self._begin(number, offset)
        assert self._open is not None  # noqa: S101  _begin has opened it
        if (self._open.number, self._open.written) != (number, offset):
            raise Refused(f"{self._open.entry.name!r} has no end, or a part of it is missing")
        self._open.hasher.update(data)
        self._open.written += len(data)
        self._write(memoryview(data))

    def _begin(self, number: int, offset: int) -> None:
        """Open a file that comes in parts, or go on with what is here of it."""
        entry = self._entry(number)
        known = self._known.get(number)
        if known is not None and known.size == offset:
            self._open = _Open(number, entry, offset, self._go_on(entry, known))
        elif offset:
            raise Refused(f"{entry.name!r} continues a file that is not here")
        else:
            self._files.begin(entry)
            self._open = _Open(number, entry, 0, hashlib.sha256())

    def _go_on(self, entry: Entry, known: Known) -> Any:
        """Continue a file whose beginning is here; return a hasher that has read it."""
        folder = self._files.parent(known.path)
        if folder.kind(known.path[-1]):
            raise Refused(f"{entry.name!r} was sent twice")
        self._transfer.done += known.size
        if known.root is self._arrived.before:
            here.take(known, folder)
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(known.path[-1], flags, dir_fd=folder.descriptor)
            self._files.go_on(entry, known.path, descriptor)
            return known.hasher
        descriptor = folder.create(known.path[-1], 0o600 | (entry.mode & 0o755))
        self._files.go_on(entry, known.path, descriptor)
        return here.copy(known, descriptor)

    def _end(self, record: Record) -> None:
        self._entry(record.number)
        known = self._known.get(record.number)
        if self._open is None and known is not None and known.size == record.size:
            if known.hasher.digest()[:DIGEST] == record.digest and known.root is not self._arrived.before:
                self._keep(known)
                self._transfer.done += known.size
                del self._wanted[record.number]
                return
            self._begin(record.number, known.size)
        elif self._open is None:  # it has become empty
            self._begin(record.number, 0)
        assert self._open is not None  # noqa: S101  it was just opened
        entry = self._open.entry
        digest = self._open.hasher.digest()[:DIGEST]
        if (self._open.number, self._open.written, digest) != (record.number, record.size, record.digest):
            raise Refused(f"{entry.name!r} differs from what the node has read")
        self._open = None
        self._complete(entry, record)
        del self._wanted[record.number]

    def _write(self, piece: memoryview) -> None:
        self._files.data(piece)
        self._transfer.done += len(piece)
        self._transfer.received += len(piece)
        self._progress(self._transfer)

    def _complete(self, entry: Entry, record: Record) -> None:
        if record.changed and self._files.writes:
            self._notes.changed(entry.name)
        self._files.end(record.mtime_ns, exact=record.settled)

    def _finish(self) -> None:
        if self._open is not None:
            raise Refused(f"{self._open.entry.name!r} has no end")
        if self._wanted:
            name = next(iter(self._wanted.values())).name
            raise Refused(f"{name!r} was not sent, and not said to be missing")
        self._is_finished = True
