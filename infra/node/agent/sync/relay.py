"""What the first node has received of a sync, for the others: frames in memory, and files on the disk.

Each node that connects gets the listing, says what it lacks, and gets that in the order in which it arrived
here, as soon as it does. A slow one never slows the sender: what is no longer in memory is read from the
disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Callable, Optional, Union

from agent.node.link import Link, Server
from agent.sync.writer import Incoming
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import Entry, path_from_wire
from cloudddp.agent.protocol.sending import Sender, Wanted, as_missing
from cloudddp.agent.protocol.transfer import PART_SIZE, Frame, Listing

PURPOSE = "sync"
IN_MEMORY = 64 << 20  # bytes of frames
ALIVE = 1.0  # seconds without anything to send


class Files:
    """Some files that are here; `raw` while the frame in which they came is in memory."""

    def __init__(self, indexes: Iterable[int], raw: Optional[bytes] = None) -> None:
        self.indexes, self.raw = frozenset(indexes), raw


class Large:
    """A file that arrives in parts. `again`: the sender has started again, since the file was changing. `end`
    is its last frame, once it has its name."""

    def __init__(self, index: int, incoming: Incoming, *, again: bool) -> None:
        self.index, self.incoming, self.again = index, incoming, again
        self.end: Optional[bytes] = None


class Relay:
    """Serves `others`, as many nodes; with 0 nobody, and keeps nothing. The methods until `complete` are
    called by the thread that receives."""

    def __init__(self, folder: Path, secret: str, others: int) -> None:
        self._folder, self._secret, self._others = folder, secret.encode(), others
        self._server = Server(secret, PURPOSE, others, self._serve)
        self._changed = threading.Condition()
        self._log: list[Union[Files, Large]] = []
        self._in_memory: deque[Files] = deque()
        self._size = 0  # bytes of those
        self._listing: Optional[bytes] = None
        self._entries: list[tuple[str, Entry]] = []  # of the listing, by index
        self._complete = self._closed = False

    def listed(self, frame: Frame, listing: Listing) -> None:
        """Pass the listing on: the other nodes compare it with their files while this one does."""
        with self._changed:
            self._entries, self._listing = listing.entries(), frame.raw
            self._changed.notify_all()

    def present(self, indexes: Iterable[int]) -> None:
        """Some files are on the disk."""
        self._add(Files(indexes))

    def arrived(self, frame: Frame) -> None:
        """Some files have been written."""
        files = Files(transfer.indexes(frame), frame.raw)
        self._in_memory.append(files)
        self._size += len(frame.raw)
        self._add(files)
        while self._size > (IN_MEMORY if self._others else 0):
            oldest = self._in_memory.popleft()
            self._size -= len(oldest.raw or b"")
            oldest.raw = None

    def begin(self, index: int, incoming: Incoming, *, again: bool) -> Large:
        large = Large(index, incoming, again=again)
        self._add(large)
        return large

    def grown(self) -> None:
        """There is more of a file that arrives in parts."""
        with self._changed:
            self._changed.notify_all()

    def ended(self, large: Large, end: Optional[bytes]) -> None:
        """The file is complete and has its name, or has failed: without `end`."""
        with self._changed:
            large.end = end
            large.incoming.close()
            self._changed.notify_all()

    def complete(self) -> None:
        """This node has all files."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def _add(self, item: Union[Files, Large]) -> None:
        with self._changed:
            self._log.append(item)
            self._changed.notify_all()

    # -- connections -----------------------------------------------------------------------------------------

    def listen(self, address: str, port: int) -> None:
        """Raises OSError."""
        self._server.listen(address, port)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()

    def _serve(self, link: Link) -> None:
        """Serve one node. It gets the files from the laptop if this fails."""
        if not self._wait_for(link, lambda: self._listing is not None):
            return
        link.write_all(self._listing or b"")
        wants = transfer.read_wants(transfer.read_frame(link.read_all, self._secret))
        wanted = dict(wants.of(self._entries))
        at = 0
        while self._wait_for(link, lambda: at < len(self._log) or self._complete):  # noqa: B023  called at once
            if at == len(self._log):
                break
            self._send(link, self._log[at], wanted)
            at += 1
        if not self._closed:
            link.write_all(transfer.frame(self._secret, transfer.DONE))
            link.read_all(1)  # it closes the connection

    def _wait_for(self, link: Link, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds; return False if this node has ended before."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: condition() or self._closed, ALIVE):
                    return condition()
            self._alive(link)

    def _alive(self, link: Link) -> None:
        link.write_all(transfer.frame(self._secret, transfer.ALIVE))

    # -- what is sent ----------------------------------------------------------------------------------------

    def _send(self, link: Link, item: Union[Files, Large], wanted: dict[int, int]) -> None:
        if isinstance(item, Large):
            if item.index in wanted:
                self._send_large(link, item, 0 if item.again else wanted[item.index])
        elif chosen := item.indexes & wanted.keys():
            raw = item.raw
            if raw is not None:
                link.write_all(raw)
            else:
                self._send_from_disk(link, {index: wanted[index] for index in sorted(chosen)})

    def _send_large(self, link: Link, item: Large, offset: int) -> None:
        incoming = item.incoming
        with self._changed:
            opened = incoming.duplicate()
        if opened is None:
            if item.end is not None:
                self._send_from_disk(link, {item.index: offset})
            return
        with open(opened, "rb") as file:
            is_open = True
            while is_open:
                if not self._wait_for(link, lambda: incoming.is_ahead_of(offset)):  # noqa: B023  called at once
                    return
                is_open, written = incoming.is_open, incoming.written
                while offset < written:
                    size = min(PART_SIZE, written - offset)
                    link.write_all(transfer.part_begin(self._secret, item.index, offset, size))
                    link.write_part(file, offset, size)
                    offset += size
            if item.end is not None:  # else the sender starts again, or the receiver asks the laptop
                link.write_all(item.end)

    def _send_from_disk(self, link: Link, wanted: dict[int, int]) -> None:
        files = [Wanted(index, path_from_wire(self._entries[index][0]), at) for index, at in wanted.items()]
        last = time.monotonic()
        for data in Sender(str(self._folder), self._secret, on_lost=as_missing).frames(files):
            if data:
                link.write_all(data)
            elif time.monotonic() - last < ALIVE:
                continue  # it hashes what the other node has
            else:
                self._alive(link)
            last = time.monotonic()
