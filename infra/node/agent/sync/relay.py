"""What a node has received of a sync, for the nodes after it: frames in memory, and files on the disk.

Each node that connects gets the listing, says what it lacks, and gets that in the order in which it arrived
here, as soon as it does. A slow one never slows the sender: what is no longer in memory is read from the
disk.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Optional, Union

from agent.node.link import REFUSED, Link
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import Entry, path_from_wire
from cloudddp.agent.protocol.sending import Sender, Wanted
from cloudddp.agent.protocol.transfer import PART_SIZE, Frame, Wants

PURPOSE = "sync"
IN_MEMORY = 64 << 20  # bytes of frames
ALIVE = 1.0  # seconds without anything to send
MAX_CONNECTIONS = 64  # besides those of the nodes


def _ignore(_wanted: Wanted, _error: OSError) -> None:
    """The receiver gets the file from elsewhere."""


class Batch:
    """Some files that have arrived; `raw` while their frame is in memory."""

    def __init__(self, indexes: Iterable[int], raw: Optional[bytes]) -> None:
        self.indexes, self.raw = frozenset(indexes), raw


class LargeFile:
    """A file that arrives in parts: how much there is, and a descriptor of it until it is complete or has
    `failed`. Then there is `end`, its last frame, and the file has its name. `again`: the sender has started
    again, since the file was changing."""

    def __init__(self, index: int, descriptor: int, written: int, *, again: bool = False) -> None:
        self.index, self.written, self.again = index, written, again
        self.descriptor: Optional[int] = descriptor
        self.end: Optional[bytes] = None
        self.failed = False


class Relay:
    """Serves the nodes after this one. `arrived`, `begin`, `grown` and `ended` are called by the thread that
    receives."""

    def __init__(self, folder: Path, secret: str, nodes: int) -> None:
        self._folder, self._secret_text, self._secret = folder, secret, secret.encode()
        self._most = nodes + MAX_CONNECTIONS
        self._changed = threading.Condition()
        self._log: list[Union[Batch, LargeFile]] = []
        self._in_memory = 0
        self._oldest = 0  # position in the log of the first frame that is in memory
        self._listing: Optional[bytes] = None
        self._is_compared = False
        self._entries: list[tuple[str, Entry]] = []  # of the listing, by index
        self._lacked: frozenset[int] = frozenset()
        self._complete = self._closed = False
        self._links: set[Link] = set()
        self._listener: Optional[socket.socket] = None

    # -- the thread that receives ----------------------------------------------------------------------------

    def listed(self, raw: bytes) -> None:
        """Pass the listing on: the nodes after this one compare it with their files while this one does."""
        with self._changed:
            self._listing = raw
            self._changed.notify_all()

    def compared(self, entries: list[tuple[str, Entry]], lacked: frozenset[int]) -> None:
        """`entries` are those of the listing, by index; `lacked` the indexes of files that this node does not
        have yet."""
        with self._changed:
            self._is_compared, self._entries, self._lacked = True, entries, lacked
            self._changed.notify_all()

    def arrived(self, frame: Frame) -> None:
        """Some files have been written."""
        with self._changed:
            self._log.append(Batch(transfer.indexes(frame), frame.raw))
            self._in_memory += len(frame.raw)
            while self._in_memory > IN_MEMORY:
                item = self._log[self._oldest]
                if isinstance(item, Batch) and item.raw is not None:
                    self._in_memory -= len(item.raw)
                    item.raw = None
                self._oldest += 1
            self._changed.notify_all()

    def renamed(self, indexes: Iterable[int]) -> None:
        """Some files that this node had have got the names that they have in the listing."""
        with self._changed:
            self._log.append(Batch(indexes, None))
            self._changed.notify_all()

    def begin(self, large: LargeFile) -> None:
        with self._changed:
            self._log.append(large)
            self._changed.notify_all()

    def grown(self, large: LargeFile, written: int) -> None:
        with self._changed:
            large.written = written
            self._changed.notify_all()

    def ended(self, large: LargeFile, end: Optional[bytes]) -> None:
        """The file is complete and has its name, or has failed: without `end`."""
        with self._changed:
            large.end = end
            large.failed = large.failed or end is None
            if large.descriptor is not None:
                os.close(large.descriptor)
                large.descriptor = None
            self._changed.notify_all()

    def complete(self) -> None:
        """This node has all files."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    # -- connections -----------------------------------------------------------------------------------------

    def listen(self, address: str, port: int) -> None:
        """Raises OSError."""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((address, port))
        self._listener.listen(self._most)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            links = list(self._links)
            self._changed.notify_all()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.end()

    def _accept(self, listener: socket.socket) -> None:
        with listener, contextlib.suppress(OSError):
            while not self._closed:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(connection, self._secret_text, PURPOSE)
                with self._changed:
                    is_taken = not self._closed and len(self._links) < self._most
                    if is_taken:
                        self._links.add(link)
                if is_taken:
                    threading.Thread(target=self._serve, args=(link,), daemon=True).start()
                else:
                    link.close()

    def _serve(self, link: Link) -> None:
        """Serve one node. It tries another one if this fails."""
        try:
            link.accept()
            if self._wait_for(link, lambda: self._listing is not None):
                assert self._listing is not None  # noqa: S101  the condition
                link.write_all(self._listing)
                wants = transfer.read_wants(transfer.read_frame(link.read_all, self._secret))
                if self._wait_for(link, lambda: self._is_compared):
                    self._send(link, wants)
                    link.read_all(1)  # it closes the connection
        except (*REFUSED, EOFError):
            pass  # a stranger, or a node that was lost
        finally:
            with self._changed:
                self._links.discard(link)
            link.close()

    def _wait_for(self, link: Link, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds; return False if this node has ended before."""
        while True:
            with self._changed:
                if not (condition() or self._closed):
                    self._changed.wait(ALIVE)
                if condition() or self._closed:
                    return condition()
            link.write_all(self._alive())

    def _alive(self) -> bytes:
        return transfer.frame(self._secret, transfer.ALIVE)

    # -- what is sent ----------------------------------------------------------------------------------------

    def _send(self, link: Link, wants: Wants) -> None:
        wanted = dict(wants.of(self._entries))
        here = {index: offset for index, offset in wanted.items() if index not in self._lacked}
        self._send_from_disk(link, here)
        for item in self._items(link):
            if isinstance(item, LargeFile):
                if item.index in wanted:
                    self._send_large(link, item, 0 if item.again else wanted[item.index])
                continue
            chosen = item.indexes & wanted.keys()
            if not chosen:
                continue
            raw = item.raw
            if raw is not None:
                link.write_all(raw)
            else:
                self._send_from_disk(link, dict.fromkeys(sorted(chosen), 0))
        link.write_all(transfer.frame(self._secret, transfer.DONE))

    def _items(self, link: Link) -> Iterator[Union[Batch, LargeFile]]:
        """Yield what has arrived, and what arrives, until this node has all."""
        at = 0
        while True:
            with self._changed:
                if at == len(self._log) and not (self._complete or self._closed):
                    self._changed.wait(ALIVE)
                item = self._log[at] if at < len(self._log) else None
                if self._closed or (item is None and self._complete):
                    return
            if item is None:
                link.write_all(self._alive())
            else:
                at += 1
                yield item

    def _send_large(self, link: Link, item: LargeFile, offset: int) -> None:
        opened = self._open(item)
        if opened is None:
            if not item.failed:  # it was changed here: what there is now is verified by the receiver
                self._send_from_disk(link, {item.index: offset})
            return
        with open(opened, "rb") as file:
            while True:
                with self._changed:
                    if item.written <= offset and item.end is None and not item.failed and not self._closed:
                        self._changed.wait(ALIVE)
                    written, end = item.written, item.end
                    if item.failed or self._closed:
                        return  # the receiver asks another node, or the laptop
                while offset < written:
                    size = min(PART_SIZE, written - offset)
                    link.write_all(transfer.part_begin(self._secret, item.index, offset, size))
                    link.write_part(file, offset, size)
                    offset += size
                if end is not None:
                    link.write_all(end)
                    return
                if offset == written:
                    link.write_all(self._alive())

    def _open(self, item: LargeFile) -> Optional[int]:
        """Return a descriptor of a file that arrives, or has arrived and is unchanged in size. Each costs
        one: there may be more large files than a process may open."""
        with self._changed:
            if item.failed:
                return None
            if item.descriptor is not None:
                return os.dup(item.descriptor)
        path = self._folder / self._path(item.index)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_size == item.written:
            return descriptor
        os.close(descriptor)
        return None

    def _path(self, index: int) -> str:
        return path_from_wire(self._entries[index][0])

    def _send_from_disk(self, link: Link, wanted: dict[int, int]) -> None:
        files = [Wanted(index, self._path(index), offset) for index, offset in wanted.items()]
        last = time.monotonic()
        for data in Sender(str(self._folder), self._secret, on_lost=_ignore).frames(files):
            if data:
                link.write_all(data)
            elif time.monotonic() - last < ALIVE:
                continue  # it hashes what the other node has
            else:
                link.write_all(self._alive())
            last = time.monotonic()
