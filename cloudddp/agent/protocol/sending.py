"""Files -> the frames of a transfer: project files on the laptop; on a node what it has for another node, and
results for the laptop.

A file may change while it is read. It is described as it was read, then looked at once more: a file that has
changed is read again, and after TRIES the receiver and the caller get to know. Results of more than PART_SIZE
are read once: a log may grow for as long as its job runs.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Callable, NamedTuple, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_SIZE
from cloudddp.agent.protocol.manifest import time_of
from cloudddp.agent.protocol.transfer import DIGEST, NOTHING, PART_SIZE, Encoded, FileHead, PartialFile, plain

TRIES = 3
RECENT_NS = 10**9  # a write so long after the last one gets another time, by the clock of any file system
HASHED = 32 << 20  # bytes that are only hashed, after which the caller gets a turn
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class FileRequest(NamedTuple):
    """A file to send, by its index in the listing and its path as the operating system has it: as a whole, or
    without what the receiver has of it, if that is its beginning. `most`: bytes that the receiver takes."""

    number: int
    path: str
    known: PartialFile = NOTHING
    most: float = math.inf


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

    def read(self, count: int = MAX_SIZE) -> bytes:
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


def no_hole(_descriptor: int) -> tuple[int, int]:
    return 0, 0


def as_missing(_wanted: FileRequest, _error: OSError) -> None:
    """Do nothing, as the `on_lost` of a Sender whose receiver knows another source."""


@dataclass(eq=False)
class Sender:
    """Makes frames of files below `root`. `on_sent` gets each file's path, and its head as it was read.
    `encode` returns some data with its codec; `hole`, where the hole of an open file is, which is not sent. A
    large file that changes is read up to `tries` times. `locate` returns where a file is: the same path, or
    one outside `root`.

    A file that cannot be read raises UnreadableFile, and one that does not exist is sent as deleted. With
    `on_lost`, which gets why, both are sent as missing, perhaps after some parts.
    """

    root: str
    secret: bytes
    on_sent: Callable[[str, FileHead], None] = lambda *_: None
    on_lost: Optional[Callable[[FileRequest, OSError], None]] = None
    encode: Callable[[bytes], Encoded] = plain
    hole: Callable[[int], tuple[int, int]] = no_hole
    tries: int = TRIES
    locate: Callable[[str], str] = str

    def frames(self, files: Iterable[FileRequest]) -> Iterator[bytes]:
        """Yield the frames of files, in order, small ones together; b"" from time to time while there are
        none, because what the receiver has is hashed."""
        gathered, size = list[bytes](), 0
        for frame in self._frames(files):
            gathered.append(frame)
            size += len(frame)
            if size >= PART_SIZE or not frame:
                yield b"".join(gathered)
                gathered, size = [], 0
        if gathered:
            yield b"".join(gathered)

    def _frames(self, files: Iterable[FileRequest]) -> Iterator[bytes]:
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for wanted in files:
                try:
                    descriptor = os.open(self.locate(wanted.path), _READ, dir_fd=root)
                    try:
                        yield from self._file(wanted, descriptor)
                    finally:
                        os.close(descriptor)
                except OSError as error:  # noqa: PERF203  each file may be gone
                    yield transfer.end(self.secret, self._gone(wanted, error))
        finally:
            os.close(root)

    def _contents(self, descriptor: int, info: os.stat_result) -> FixedSize:
        return FixedSize(descriptor, info.st_size, self.hole(descriptor))

    def _gone(self, wanted: FileRequest, error: OSError) -> FileHead:
        """Return the head of a file that cannot be read. Raises UnreadableFile."""
        if self.on_lost is not None:
            self.on_lost(wanted, error)
        elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise UnreadableFile(wanted.path, error) from None
        missing = self.on_lost is not None
        return FileHead(wanted.number, 0, 0, False, b"\0" * DIGEST, missing=missing, deleted=not missing)

    def _file(self, wanted: FileRequest, descriptor: int) -> Iterator[bytes]:
        """Yield a file in parts. What the receiver has is only hashed. The last part comes with the end, so a
        small file that is changing is read again before any of it is sent."""
        offset, after = wanted.known.size, os.fstat(descriptor)
        if not stat.S_ISREG(after.st_mode):
            raise OSError(0, "it is no longer a regular file")
        tries = self.tries if after.st_size > PART_SIZE else TRIES
        for attempt in range(tries):
            began, before = time.time_ns(), after
            contents = self._contents(descriptor, before)
            if contents.size > wanted.most:
                raise OSError(0, "it has grown too much since it was listed; repeat the command")
            digest, at, last = sha256(), 0, b""
            if offset:
                at = yield from _hash(contents, offset, digest)
                if at < offset or digest.hexdigest()[: 2 * DIGEST] != wanted.known.digest:
                    contents = self._contents(descriptor, before)
                    digest, at = sha256(), 0
            while data := contents.read(min(PART_SIZE, contents.size - at)):
                if last:
                    yield transfer.part(self.secret, wanted.number, at - len(last), last, self.encode)
                digest.update(data)
                at, last = at + len(data), data
            if at < contents.size and tries == 1:
                raise OSError(0, "it became shorter while it was read")
            after = os.fstat(descriptor)
            is_stable = is_same(before, after) and at == contents.size
            if is_stable or attempt == tries - 1:
                head = _head(wanted.number, before, at, digest.digest(), began, is_stable=is_stable)
                self.on_sent(wanted.path, head)
                yield transfer.end(self.secret, head, last, self.encode)
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


def _head(
    index: int, info: os.stat_result, size: int, digest: bytes, began: int, *, is_stable: bool
) -> FileHead:
    return FileHead(
        index,
        size,
        time_of(info),
        bool(info.st_mode & 0o111),
        digest[:DIGEST],
        unsettled=not is_stable or began - info.st_mtime_ns <= RECENT_NS,
        changed=not is_stable,
    )


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return one.st_size == other.st_size and one.st_mtime_ns == other.st_mtime_ns
