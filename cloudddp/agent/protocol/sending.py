"""Files -> the frames of a transfer: project files on the laptop, and on a node that passes on what it has;
results on a node.

A file may change while it is read. It is described as it was read, then looked at once more: a file that has
changed is read again, and after TRIES the receiver and the caller get to know. Results are read once: a log
may grow for as long as its job runs.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Callable, NamedTuple, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_SIZE
from cloudddp.agent.protocol.transfer import (
    DIGEST,
    MAX_BATCH,
    MAX_BODY,
    PART_SIZE,
    SMALL,
    Encoded,
    Record,
    plain,
)

TRIES = 3
RECENT_NS = 10**9  # after a write so long ago another one has another time, by the clock of any file system
HASHED = 32 << 20  # bytes that are only hashed, after which the caller gets a turn
_LATEST_NS = MAX_SIZE // 10**9 * 10**9
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Wanted(NamedTuple):
    """A file to send, by its index in the listing, its path as the operating system has it, from `offset`
    on; with a `digest` (SHA-256, hex) only if the bytes before it have that one, else as a whole."""

    number: int
    path: str
    offset: int = 0
    digest: str = ""


class UnreadableFile(Exception):
    """A file cannot be read."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(path)
        self.path, self.error = path, error


class FixedSize:
    """A file of the size that it had when it was opened, without a hole in it: `size` bytes."""

    def __init__(self, descriptor: int, end: int, hole: tuple[int, int]) -> None:
        end = max(end, hole[1])  # the file may have grown since
        self.size = end - (hole[1] - hole[0])
        self._descriptor, self._hole, self._end, self._at = descriptor, hole, end, 0

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end."""
        begin, end = self._hole
        found = b""
        while len(found) < count:
            if begin <= self._at < end:
                self._at = end
            limit = begin if self._at < begin else self._end
            data = os.pread(self._descriptor, min(count - len(found), limit - self._at), self._at)
            if not data:
                break
            self._at += len(data)
            found += data
        return found


OnSent = Callable[[str, Record, Optional[int]], None]  # path, record, inode or None


def ignore(_path: str, _record: Record, _inode: Optional[int]) -> None:
    """Do nothing, as an OnSent."""


def as_missing(_wanted: Wanted, _error: OSError) -> None:
    """Do nothing, as the `on_lost` of a Sender whose receiver knows another source."""


def no_hole(_wanted: Wanted, _descriptor: int) -> tuple[int, int]:
    """Send all of a file."""
    return 0, 0


@dataclass(eq=False)
class Sender:
    """Makes frames of files below `root`. `on_sent` gets each file's path, its record as it was read, and its
    inode, or None if it was changing. `encode` returns some data with its codec. A large file that changes is
    read up to `tries` times. `locate` returns where a file is: the same path, or one outside `root`.

    A file that cannot be read raises UnreadableFile, and one that does not exist is sent as deleted. With
    `on_lost`, which gets why, both are sent as missing, perhaps after some parts.
    """

    root: str
    secret: bytes
    on_sent: OnSent = ignore
    on_lost: Optional[Callable[[Wanted, OSError], None]] = None
    encode: Callable[[bytes], Encoded] = plain
    hole: Callable[[Wanted, int], tuple[int, int]] = no_hole
    tries: int = TRIES
    locate: Callable[[str], str] = str

    def frames(self, files: Iterable[Wanted]) -> Iterator[bytes]:
        """Yield the frames of files, in order as far as their sizes are alike; b"" from time to time while
        there are none, because what the receiver has is hashed."""
        records: list[Record] = []
        contents: list[bytes] = []
        size = 0
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for wanted in files:
                try:
                    descriptor, info = _open(self.locate(wanted.path), root)
                except OSError as error:
                    records.append(self._gone(wanted, error))
                    continue
                try:
                    if info.st_size > SMALL or wanted.offset:
                        yield from self._large(wanted, descriptor)
                        continue
                    record, data, inode = self._read_small(wanted, descriptor, info)
                except OSError as error:
                    # Alone: perhaps after parts of it, which other files must not follow.
                    yield self._batch([self._gone(wanted, error)], [])
                    continue
                finally:
                    os.close(descriptor)
                if records and (size + len(data) > SMALL or len(records) >= MAX_BATCH):
                    yield self._batch(records, contents)
                    records, contents, size = [], [], 0
                self.on_sent(wanted.path, record, inode)
                records.append(record)
                contents.append(data)
                size += len(data)
            if records:
                yield self._batch(records, contents)
        finally:
            os.close(root)

    def _contents(self, wanted: Wanted, descriptor: int, info: os.stat_result) -> FixedSize:
        return FixedSize(descriptor, info.st_size, self.hole(wanted, descriptor))

    def _gone(self, wanted: Wanted, error: OSError) -> Record:
        """Return the record of a file that cannot be opened. Raises UnreadableFile."""
        if self.on_lost is not None:
            self.on_lost(wanted, error)
        elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise UnreadableFile(wanted.path, error) from None
        missing = self.on_lost is not None
        return Record(wanted.number, 0, 0, False, b"\0" * DIGEST, missing=missing, deleted=not missing)

    def _batch(self, records: list[Record], contents: list[bytes]) -> bytes:
        data = b"".join(contents)
        return transfer.batch(self.secret, records, data, self.encode)

    def _read_small(
        self, wanted: Wanted, descriptor: int, before: os.stat_result
    ) -> tuple[Record, bytes, Optional[int]]:
        """Return the record of a file, its contents, and its inode, or None if it was changing. `before`: its
        status when it was opened."""
        for attempt in range(TRIES):
            began = time.time_ns()
            if attempt:
                before = os.fstat(descriptor)
            contents = self._contents(wanted, descriptor, before)
            data = contents.read(min(contents.size, MAX_BODY)) if contents.size else b""  # it may have grown
            is_stable = len(data) == contents.size and _same(before, os.fstat(descriptor))
            if is_stable:
                break
        digest = sha256(data).digest()
        record = _record(wanted.number, before, len(data), digest, began, is_stable=is_stable)
        return record, data, before.st_ino if is_stable else None

    def _large(self, wanted: Wanted, descriptor: int) -> Iterator[bytes]:
        """Yield a file in parts. What the receiver has is only hashed."""
        offset = wanted.offset
        for attempt in range(self.tries):
            began, before = time.time_ns(), os.fstat(descriptor)
            contents = self._contents(wanted, descriptor, before)
            digest, at = sha256(), 0
            if offset:
                at = yield from _hash(contents, offset, digest)
                if at < offset or (wanted.digest and digest.hexdigest() != wanted.digest):
                    contents = self._contents(wanted, descriptor, before)
                    digest, at = sha256(), 0
            while data := contents.read(min(PART_SIZE, contents.size - at)):
                digest.update(data)
                yield transfer.part(self.secret, wanted.number, at, data, self.encode)
                at += len(data)
            if at < contents.size and self.tries == 1:
                raise OSError(0, "it became shorter while it was read")
            is_stable = _same(before, os.fstat(descriptor)) and at == contents.size
            if is_stable or attempt == self.tries - 1:
                record = _record(wanted.number, before, at, digest.digest(), began, is_stable=is_stable)
                self.on_sent(wanted.path, record, before.st_ino if is_stable else None)
                yield transfer.end(self.secret, record)
                return
            offset = 0


def _hash(contents: FixedSize, size: int, digest: Any) -> Generator[bytes, None, int]:
    """Hash the first `size` bytes; return how many there are. Yield b"" from time to time."""
    at = 0
    while data := contents.read(min(PART_SIZE, size - at)):
        digest.update(data)
        at += len(data)
        if at % HASHED < len(data):
            yield b""
    return at


def _open(path: str, root: int) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file, and its status."""
    descriptor = os.open(path, _READ, dir_fd=root)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no longer a regular file")
    return descriptor, info


def _record(
    index: int, info: os.stat_result, size: int, digest: bytes, began: int, *, is_stable: bool
) -> Record:
    return Record(
        index,
        size,
        time_of(info),
        bool(info.st_mode & 0o111),
        digest[:DIGEST],
        settled=is_stable and began - info.st_mtime_ns > RECENT_NS,
        changed=not is_stable,
    )


def time_of(info: os.stat_result) -> int:
    """Return a file's mtime (ns), or the latest whole second that a frame may hold."""
    return info.st_mtime_ns if info.st_mtime_ns <= MAX_SIZE else _LATEST_NS


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return one.st_size == other.st_size and one.st_mtime_ns == other.st_mtime_ns
