"""Files -> the frames of a transfer: on the laptop, and on a node that passes on what it has.

A file may change while it is read. It is described as it was read, then looked at once more: a file that has
changed is read again, and after TRIES the caller gets to know.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Callable, NamedTuple, Optional

from cloudddp.agent.protocol import transfer
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
HASHED = 32 << 20  # bytes that are only hashed, after which the caller gets a turn
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Wanted(NamedTuple):
    """A file to send, by its index in the listing, its path as the operating system has it, from `offset`
    on."""

    number: int
    path: str
    offset: int = 0


class UnreadableFile(Exception):
    """A file cannot be read."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(path)
        self.path, self.error = path, error


OnSent = Callable[[str, Record, Optional[int]], None]  # path, record, inode or None


def ignore(_path: str, _record: Record, _inode: Optional[int]) -> None:
    """Do nothing, as an OnSent."""


class Sender:
    """Makes frames of files below `root`. `on_sent` gets each file's path, its record as it was read, and its
    inode, or None if it was changing. `encode` returns some data with its codec. A file that cannot be read
    raises UnreadableFile, or is sent as missing where `tolerant`; one that does not exist is sent as deleted
    otherwise."""

    def __init__(
        self,
        root: str,
        secret: bytes,
        *,
        on_sent: OnSent = ignore,
        encode: Callable[[bytes], Encoded] = plain,
        tolerant: bool = False,
    ) -> None:
        self._root, self._secret, self._on_sent, self._encode, self._tolerant = (
            root,
            secret,
            on_sent,
            encode,
            tolerant,
        )

    def frames(self, files: Iterable[Wanted]) -> Iterator[bytes]:
        """Yield the frames of files, in order as far as their sizes are alike; b"" from time to time while
        there are none, because what the receiver has is hashed."""
        records: list[Record] = []
        contents: list[bytes] = []
        size = 0
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for wanted in files:
                try:
                    descriptor, info = _open(wanted.path, root)
                except OSError as error:
                    is_deleted = isinstance(error, (FileNotFoundError, NotADirectoryError))
                    if not (self._tolerant or is_deleted):
                        raise UnreadableFile(wanted.path, error) from None
                    gone = Record(
                        wanted.number,
                        0,
                        0,
                        False,
                        b"\0" * DIGEST,
                        missing=self._tolerant,
                        deleted=not self._tolerant,
                    )
                    records.append(gone)
                    continue
                try:
                    if info.st_size > SMALL or wanted.offset:
                        yield from self._large(wanted, descriptor)
                        continue
                    record, data, inode = _read_small(wanted.number, descriptor, info)
                finally:
                    os.close(descriptor)
                if records and (size + len(data) > SMALL or len(records) >= MAX_BATCH):
                    yield self._batch(records, contents)
                    records, contents, size = [], [], 0
                self._on_sent(wanted.path, record, inode)
                records.append(record)
                contents.append(data)
                size += len(data)
            if records:
                yield self._batch(records, contents)
        finally:
            os.close(root)

    def _batch(self, records: list[Record], contents: list[bytes]) -> bytes:
        data = b"".join(contents)
        return transfer.batch(self._secret, records, data, self._encode)

    def _large(self, wanted: Wanted, descriptor: int) -> Iterator[bytes]:
        """Yield a file in parts. What the receiver has is only hashed."""
        begin = wanted.offset
        for attempt in range(TRIES):
            before = os.fstat(descriptor)
            digest = sha256()
            at = 0
            os.lseek(descriptor, 0, os.SEEK_SET)
            while at < before.st_size:
                data = os.read(descriptor, min(PART_SIZE, before.st_size - at))
                if not data:
                    break
                digest.update(data)
                if at + len(data) > begin:
                    kept = data[max(begin - at, 0) :]
                    yield transfer.part(self._secret, wanted.number, max(at, begin), kept, self._encode)
                at += len(data)
                if at <= begin and at % HASHED < len(data):
                    yield b""
            stable = _same(before, os.fstat(descriptor)) and at == before.st_size
            if stable or attempt == TRIES - 1:
                record = _record(wanted.number, before, at, digest.digest())
                self._on_sent(wanted.path, record, before.st_ino if stable else None)
                yield transfer.end(self._secret, record)
                return
            begin = 0


def _open(path: str, root: int) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file, and its status."""
    descriptor = os.open(path, _READ, dir_fd=root)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no longer a regular file")
    return descriptor, info


def _read_small(index: int, descriptor: int, before: os.stat_result) -> tuple[Record, bytes, Optional[int]]:
    """Return the record of a file, its contents, and its inode, or None if it was changing. `before`: its
    status when it was opened."""
    for attempt in range(TRIES):
        if attempt:
            before = os.fstat(descriptor)
        # It may have grown since then.
        data = os.pread(descriptor, min(before.st_size, MAX_BODY), 0) if before.st_size else b""
        stable = len(data) == before.st_size and _same(before, os.fstat(descriptor))
        if stable:
            break
    record = _record(index, before, len(data), sha256(data).digest())
    return record, data, before.st_ino if stable else None


def _record(index: int, info: os.stat_result, size: int, digest: bytes) -> Record:
    return Record(index, size, info.st_mtime_ns, bool(info.st_mode & 0o111), digest[:DIGEST])


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return one.st_size == other.st_size and one.st_mtime_ns == other.st_mtime_ns
