"""Takes the stream of a node into the folder of a transfer: new files, and those that were here already.

A file that is continued is compared with the hash of the whole file as the agent has read it, so it is never
a mix of two versions. What arrives in one transfer is verified by SSH.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.files import End, Entry, LeftOut, Total
from cloudddp.job.results import local_files as here
from cloudddp.job.results.file_stream import Refused
from cloudddp.job.results.incoming import Incoming
from cloudddp.job.results.local_files import Known
from cloudddp.job.results.pull_notes import Notes
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import Unpack


@dataclass(slots=True)
class Transfer:
    """The state of a transfer, for the display of progress. `done` of `total` bytes are here, of which
    `received` were sent."""

    total: int = 0
    done: int = 0
    received: int = 0


Progress = Callable[[Transfer], None]


class Receive:
    """A stream.Receiver. `known` are the files that were described to the node."""

    def __init__(
        self,
        arrived: Incoming,
        roots: Sequence[Parts],
        known: Sequence[Known],
        notes: Notes,
        *,
        node: int,
        since: int = 0,
        progress: Progress = lambda _: None,
    ) -> None:
        self.unchanged = 0  # files in the target that are as on the node
        self.older = 0  # of these, how many are older than `since` (seconds)
        self._since = since * 10**9
        self._arrived, self._notes = arrived, notes
        self._known = known
        self._by_path = {one.path: one for one in known if one.hasher is not None}
        self._files = Unpack(arrived.files, roots, notes, node)
        self._entry: Entry | None = None
        self._hasher: Any = None
        self._transfer, self._progress = Transfer(), progress

    def __enter__(self) -> Receive:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def heard(self) -> None:
        """The node has sent something, perhaps only that it works."""
        self._progress(self._transfer)

    def total(self, total: Total) -> None:
        self._transfer.total = total.size
        self._progress(self._transfer)

    def same(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number >= len(self._known) or self._known[number].used:
                raise Refused(f"file {number} of this computer is the same, which has none or had it before")
            one = self._use(self._known[number])
            if one.hasher is not None:
                raise Refused(f"{one.name!r} is the same by its time, which does not identify it")
            if one.root is self._arrived.before:
                here.take(one, self._files.parent(one.path))
            else:
                self._keep(one)
        self._progress(self._transfer)

    def begin(self, entry: Entry) -> None:
        self._entry = entry
        if entry.offset:
            self._go_on(entry)
        else:
            self._files.begin(entry)
            self._hasher = None

    def _go_on(self, entry: Entry) -> None:
        """Continue a file whose beginning is here."""
        path = self._files.checked(entry)
        one = self._by_path.get(path)
        if one is None or one.used or one.size != entry.offset:
            raise Refused(f"{entry.name!r} continues a file that is not here")
        self._use(one)
        self._transfer.done += one.size
        if one.size == entry.size and one.root is not self._arrived.before:
            self._hasher = one.hasher
            self._keep(one)
            return
        folder = self._files.parent(path)
        if folder.kind(path[-1]):
            raise Refused(f"{entry.name!r} was sent twice")
        if one.root is self._arrived.before:
            here.take(one, folder)
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path[-1], flags, dir_fd=folder.descriptor)
            self._files.go_on(entry, path, descriptor)
            self._hasher = one.hasher
        else:
            descriptor = folder.create(path[-1], 0o600 | (entry.mode & 0o755))
            self._files.go_on(entry, path, descriptor)
            self._hasher = here.copy(one, descriptor)

    def _keep(self, one: Known) -> None:
        """Leave a file of the target as it is."""
        self.unchanged += 1
        self.older += one.mtime_ns < self._since

    def _use(self, one: Known) -> Known:
        one.used = True
        return one

    def data(self, piece: memoryview) -> None:
        if self._files.writes:
            if self._hasher is not None:
                self._hasher.update(piece)
            self._files.data(piece)
        self._transfer.done += len(piece)
        self._transfer.received += len(piece)
        self._progress(self._transfer)

    def end(self, end: End) -> None:
        assert self._entry is not None  # noqa: S101  the reader has begun a file
        if end.state == files.GIVEN_UP:
            self._files.discard()
        elif self._files.writes or self._entry.offset:
            self._complete(self._entry, end)

    def left_out(self, one: LeftOut) -> None:
        self._notes.left_out(one.name, one.reason, counts=one.counts)

    def _complete(self, entry: Entry, end: End) -> None:
        if self._hasher is not None and self._hasher.digest() != end.digest:
            raise Refused(f"{entry.name!r} differs from what the node has read")
        if end.state == files.CHANGED:
            self._notes.changed(entry.name)
        self._files.end(exact=end.state == files.SETTLED)
