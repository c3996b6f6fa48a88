"""`pack`: send files and folders of the project, or of a job's own folder, to the laptop, as far as it lacks
them (cloudddp/agent/protocol/file_steps.py).
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, Optional

from agent.files import records
from agent.files.paths import on_one_line
from agent.files.scan import Scan, below
from agent.files.selection import choose
from agent.files.sparse import sent_size
from agent.files.tree import Found
from agent.jobs import phases
from agent.node import store
from agent.ranks import rank_log
from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.file_steps import LISTED, MAX_LISTED, PackRequest
from cloudddp.agent.protocol.manifest import FILE, LINK, Entry, path_to_wire, time_of
from cloudddp.agent.protocol.receiving import MAX_GROWTH
from cloudddp.agent.protocol.sending import FileRequest, Sender, no_hole
from cloudddp.agent.protocol.transfer import MAX_ENTRIES, UNSEALED, Listing, Wants

REQUEST = PackRequest
QUIET_SECONDS = 5.0  # after which a frame says that the agent works


def step(request: PackRequest) -> None:
    """What cannot be sent (an unreadable file, a pipe) is named in the stream; the other files are still
    sent."""
    packer = Packer(request)
    found = packer.found()
    for listing in listings(found):
        packer.write(listing.frame(UNSEALED))
    packer.write(transfer.frame(UNSEALED, transfer.DONE))
    with contextlib.suppress(EOFError):  # the laptop has gone
        packer.send(found, transfer.read_wants(transfer.read_frame(sys.stdin.buffer.read, UNSEALED)))
        packer.write(transfer.frame(UNSEALED, transfer.DONE))


class Item(NamedTuple):
    """A file, folder or link that is sent, and its entry in the listing; a folder has none but its mode."""

    found: Found
    entry: Entry
    other: str  # the job that wrote it, '' for the requested one

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.found.info.st_mode)


def listings(items: list[Item]) -> Iterator[Listing]:
    """Yield listings of all items. They are sorted, so that each index is the position of a file or link."""
    listing, length = Listing({}), 0
    for item in items:
        path = path_to_wire(item.found.name)
        if item.other != listing.job or length > MAX_LISTED:
            yield listing
            listing, length = Listing({}, job=item.other), 0
        if item.is_folder:
            listing.modes[path] = item.entry.mode
        else:
            listing.files[path] = item.entry
        length += LISTED + len(path) + len(item.entry.target)
    yield listing


class Packer:
    """Finds and sends what is at or below the paths of a request."""

    def __init__(self, request: PackRequest) -> None:
        self._request, self._written, self._left_out = request, time.monotonic(), 0
        self._folder = store.job_folder(request.job) if request.job else store.project_folder(request.project)
        self._attempts = phases.attempts() if request.results_of else []
        self._results = records.results(self._folder)

    def write(self, frame: bytes) -> None:
        sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()
        self._written = time.monotonic()

    def working(self) -> None:
        """Say that the agent works while there is nothing to send."""
        if time.monotonic() - self._written > QUIET_SECONDS:
            self.write(transfer.frame(UNSEALED, transfer.ALIVE))

    def left_out(self, name: str, reason: str, *, counts: bool = True) -> None:
        """Name what is left out: the first MAX_LEFT_OUT, then that there is more."""
        self._left_out += 1
        if self._left_out <= file_steps.MAX_LEFT_OUT:
            self.write(file_steps.left_out(name, reason[:MAX_REASON], counts=counts))
        elif self._left_out == file_steps.MAX_LEFT_OUT + 1:
            self.write(file_steps.left_out("", "more files"))

    def found(self) -> list[Item]:
        """Return what there is, in the order of the listing: by folder, the files of one together."""
        items: dict[str, Item] = {}  # by name: of a folder that changes, scandir may yield one twice
        for one in self._chosen():
            self.working()
            if len(items) >= MAX_ENTRIES:
                roots = ", ".join(on_one_line(os.path.normpath(name)) for name in self._request.paths)
                raise SystemExit(
                    f"there are more than {MAX_ENTRIES:,} files below {roots}; "
                    "name fewer: `cloudddp pull PATH`"
                )
            other = self._other(one)
            was_pulled = other and self._results.is_pulled(one.name, one.info.st_ctime_ns)
            if one.name != "." and not was_pulled and (entry := self._entry(one)) is not None:
                items[one.name] = Item(one, entry, other)
        return sorted(items.values(), key=lambda item: (item.other, *item.found.name.rpartition("/")[::2]))

    def _other(self, one: Found) -> str:
        """Return the job that wrote a file, '' for the requested one and where the writer of a copy is not
        known. Files from before all jobs count as of the first."""
        if not self._attempts or stat.S_ISDIR(one.info.st_mode):
            return ""
        copy, at = self._results.copy(one.name, one.info), (one.info.st_ctime_ns, "~", 0)
        began = max(bisect.bisect(self._attempts, at) - 1, 0)
        job = copy.job if copy is not None else self._attempts[began][1]
        return "" if job == self._request.results_of else job

    def send(self, items: list[Item], wants: Wants) -> None:
        listed = [item for item in items if not item.is_folder]
        wanted = [
            FileRequest(index, listed[index].found.path, known, listed[index].entry.size + MAX_GROWTH)
            for index, known in wants.of([(item.found.name, item.entry) for item in listed])
        ]

        def lost(one: FileRequest, error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # else it has gone
                self.left_out(listed[one.number].found.name, error.strerror or "cannot be read")

        hole = rank_log.hole_of if self._request.job else no_hole
        sender = Sender(str(self._folder), UNSEALED, on_lost=lost, hole=hole, tries=1)
        for frame in sender.frames(wanted):
            if frame:
                self.write(frame)
            else:
                self.working()

    def _chosen(self) -> Iterator[Found]:
        request, selection = self._request, self._request.selection
        if selection is None:
            every = bool(request.job) or request.all
            yield from below(self._folder, request.paths, self.left_out, every=every)
            return
        scan = Scan(
            self._folder,
            (),
            selection.scratch,
            phases.first_began(),
            seconds=math.inf,
            again=phases.began_at(store.job_folder(selection.job)),
            left_out=self.left_out,
            present=selection.present,
        )
        new = []
        for one in scan:
            self.working()
            new.append(one)
        taken, left = choose(new, selection.limit)
        for name in left:
            self.left_out(name, f"beyond job.pull_mb = {selection.limit / 2**20:g}")
        yield from (one.found for one in taken)

    def _entry(self, one: Found) -> Optional[Entry]:
        """Return an entry of the listing; None for a file that is left out."""
        info = one.info
        mode, mtime_ns = stat.S_IMODE(info.st_mode), time_of(info)
        if one.target:
            return Entry(LINK, mode, 0, mtime_ns, path_to_wire(one.target))
        size = sent_size(one, self.left_out) if self._request.job else info.st_size
        return None if size is None else Entry(FILE, mode, size, mtime_ns, "")
