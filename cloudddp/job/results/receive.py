"""Takes what a node sends of its files: listings, which are answered with what is wanted of them, and then
contents (protocol/receiving.py). What no agent sends raises ProtocolError, and with it nothing is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import SkippedEntry
from cloudddp.agent.protocol.manifest import path_from_wire
from cloudddp.agent.protocol.receiving import Receiver
from cloudddp.agent.protocol.transfer import MAX_ENTRIES, UNSEALED, Frame, Frames, Listing, Wants
from cloudddp.agent.replies import decode
from cloudddp.job.results.placing import Placing
from cloudddp.job.transfer import STUCK, given_up

MAX_TEXT = 256 << 20  # bytes of all listings
# Of all nodes. Threads that make many short system calls lose the interpreter at each of them: in turns, the
# small files of 4 nodes take 0.7 of the processor time.
_TURN = threading.Lock()

Progress = Callable[[int, int], None]  # takes how many bytes have come, and of how many


class Receive:
    """Feed it what the node sends, and send it what `answer` yields."""

    def __init__(self, placing: Placing, progress: Progress) -> None:
        self._placing, self._progress = placing, progress
        self._frames = Frames(UNSEALED)
        self._listed = self._text = self._left_out = self._total = 0
        self._is_complete, self._moved = False, time.monotonic()
        self._answer = b""  # the frame that says what is wanted
        self._receiver: Receiver | None = None  # once that is known

    def answer(self) -> Iterator[bytes]:
        """Yield what goes to the node: what is wanted, once that is known; b"" before."""
        while not self._answer:
            yield b""
        yield self._answer

    def feed(self, data: bytes) -> None:
        """Take a piece of what the node sends. Raises ProtocolError, OSError, CloudDDPError."""
        with _TURN:
            for frame in self._frames.feed(data):
                if frame.kind != transfer.ALIVE:
                    self._take(frame)
                    self._moved = time.monotonic()
                elif time.monotonic() - self._moved > STUCK:
                    raise given_up(self._placing.node, STUCK)
        # It has sent something, perhaps only that it works.
        self._progress(self._receiver.received if self._receiver else 0, self._total)

    def done(self) -> None:
        """Raises ProtocolError where the node has not sent everything."""
        if not self._is_complete:
            raise ProtocolError("the stream is truncated")

    def close(self) -> None:
        """Keep what was begun for a later transfer."""
        if self._receiver is not None:
            self._receiver.close()
        self._placing.close()

    def _take(self, frame: Frame) -> None:
        if self._is_complete:
            raise ProtocolError("the stream continues after its end")
        if frame.kind == transfer.LEFT_OUT:
            self._leave_out(decode(frame.head, SkippedEntry))
        elif self._receiver is None and frame.kind == transfer.DONE:
            self._total = self._placing.check_space()
            sizes = {number: item.entry.size for number, item in self._placing.wanted.items()}
            self._receiver = Receiver(sizes, self._placing)
            wants = Wants(tuple(sizes), self._placing.known)
            self._answer = wants.frame(UNSEALED)
        elif self._receiver is None:
            self._list(frame)
        elif frame.kind == transfer.DONE:
            self._receiver.done()
            self._is_complete = True
        else:
            self._receiver.take(frame)

    def _leave_out(self, one: SkippedEntry) -> None:
        self._left_out += 1
        if self._left_out > file_steps.MAX_LEFT_OUT + 1:
            raise ProtocolError(f"more than {file_steps.MAX_LEFT_OUT:,} files are left out")
        try:
            name, reason = path_from_wire(one.name), path_from_wire(one.reason)
        except ValueError:
            raise ProtocolError("the name of a file that is left out is not bytes") from None
        self._placing.notes.left_out(name, reason, counts=one.counts)

    def _list(self, frame: Frame) -> None:
        text = transfer.read_listing_text(frame, file_steps.MAX_LISTING_TEXT)
        listing = decode(text, Listing, limit=file_steps.MAX_LISTING_TEXT)
        entries = listing.entries()
        first, self._listed = self._listed, self._listed + len(entries)
        self._text += len(text)
        if self._listed + len(listing.modes) > MAX_ENTRIES or self._text > MAX_TEXT:
            raise ProtocolError(f"there are more than {MAX_ENTRIES:,} files")
        job = listing.job if listing.job in self._placing.places else ""
        for path, mode in sorted(listing.modes.items()):
            self._placing.folder(path_from_wire(path), mode)
        for number, (path, entry) in enumerate(entries, first):
            self._placing.item(number, path, entry, job)
