"""A rank's log on the node: which part of it is kept, when its bytes were written, and reading it.

The rank has the file as its stdout and stderr, so it never waits for another process, and what it has written
survives any of them. Its wrapper looks at the file twice a second. It removes the middle of a log that is
longer than its limit by punching a hole into the file, and writes a note after it: the other bytes keep their
offsets, so that a client continues where it was. Where the hole is, the file system knows (lseek(2),
SEEK_HOLE), and whoever sends the log skips it.

`N.times` has the time and the size of the log, at most twice a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Optional

from agent.node import store
from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.frames import MAX_PIECE, Log

BLOCK = 1 << 16  # holes begin and end at a multiple of it: no file system on nodes has larger blocks
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE (fallocate(2))
NOTE = b"\n[cloudddp: %d bytes of this log were dropped here; it was longer than job.log_mb]\n"
MAX_TIMES = 64 << 20  # bytes of `N.times`: 24 days of a rank that always writes
_TIME = struct.Struct("@dQ")  # seconds since the epoch, bytes


# -- writing -----------------------------------------------------------------------------------------------


class Keeper:
    """Keeps one log below its `limit` in bytes and records its times. `log` is open for writing."""

    def __init__(self, log: BinaryIO, path: Path, limit: int) -> None:
        self._log = log.fileno()
        self._path = path
        self._head = limit // 4 // BLOCK * BLOCK
        self._limit: Optional[int] = limit  # None where the file system cannot punch holes
        self._last = (0.0, -1)  # the last entry of `N.times`

    def look(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, for example: tried again
            size = os.fstat(self._log).st_size
            self._shorten(size)
            self._record_time(size)

    def _record_time(self, size: int) -> None:
        if size == self._last[1]:
            return
        now = max(time.time(), self._last[0])  # ascending, so that it can be searched
        access = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with store.open_regular(self._path.with_suffix(".times"), access) as file:
            if os.fstat(file.fileno()).st_size < MAX_TIMES:
                file.write(_TIME.pack(now, size))
        self._last = (now, size)

    def _shorten(self, size: int) -> None:
        """Remove the middle of a log that is too long; an eighth more than necessary, so that it is rare."""
        begin, end = hole_of(self._log)
        if begin == end:
            begin = end = self._head
        if self._limit is None or size - (end - begin) <= self._limit:
            return
        new_end = (size - (self._limit - self._head - self._limit // 8)) // BLOCK * BLOCK
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(self._log, PUNCH_HOLE, ctypes.c_int64(end), ctypes.c_int64(new_end - end)):
            self._limit = None
            return
        note = NOTE % (new_end - begin)
        with open(f"/proc/self/fd/{self._log}", "r+b") as log:  # the rank's own descriptor only appends
            os.pwrite(log.fileno(), NOTE % (new_end - begin + len(note)), new_end)


# -- reading -----------------------------------------------------------------------------------------------


def hole_of(descriptor: int) -> tuple[int, int]:
    """Return where the first hole between data begins and ends, or (0, 0). Waits while one is punched."""
    try:
        begin = os.lseek(descriptor, 0, os.SEEK_HOLE)
        end = os.lseek(descriptor, begin, os.SEEK_DATA)
    except OSError:  # no data after it
        return 0, 0
    return (begin, end) if begin < end else (0, 0)  # equal: the log has grown meanwhile


def new_frames(rank: int, path: Path, offset: int, limit: int = MAX_COUNT) -> Iterator[Log]:
    """Yield what was added to a log until now, in pieces, and at most `limit` bytes of it."""
    try:
        file = store.open_regular(path)
    except OSError:
        return
    with file:
        descriptor = file.fileno()
        size, hole = os.fstat(descriptor).st_size, hole_of(descriptor)
        while offset < size and limit:
            if hole[0] <= offset < hole[1]:
                offset = hole[1]  # which may be beyond `size` by now
                continue
            end = hole[0] if offset < hole[0] else size
            data = os.pread(descriptor, min(end - offset, MAX_PIECE, limit), offset)
            if not data:
                return
            before, hole = hole, hole_of(descriptor)
            if hole == before:  # otherwise some of it may have been removed before it was read
                yield Log(rank, offset, data)
                offset, limit = offset + len(data), limit - len(data)


def start_of(path: Path, since: Optional[float], tail: Optional[int]) -> int:
    """Return from which line to show a log: of the last `since` seconds, and of the last `tail` lines."""
    try:
        file = store.open_regular(path)
    except OSError:
        return 0
    with file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        starts = [0]
        if since is not None:
            written = min(size, _size_at(path.with_suffix(".times"), time.time() - since))
            lowest = max(written - MAX_PIECE, 0)
            begin = _after_lines(descriptor, written, 1, lowest)
            starts.append(written if begin == lowest > 0 else begin)  # within a very long line
        if tail is not None:
            has_end = size > 0 and os.pread(descriptor, 1, size - 1) == b"\n"
            starts.append(_after_lines(descriptor, size, tail + has_end, hole_of(descriptor)[1]))
        return max(starts)


def _size_at(path: Path, moment: float) -> int:
    """Return the recorded size of a log at a time: all later bytes were written after it."""
    try:
        data = store.read_bytes(path, MAX_TIMES + _TIME.size)
    except OSError:
        return 0
    data = data[: len(data) // _TIME.size * _TIME.size]
    count = bisect_right(array("d", data)[::2], moment)
    return array("Q", data)[2 * count - 1] if count else 0


def _after_lines(descriptor: int, end: int, count: int, lowest: int) -> int:
    """Return the offset behind the last line end but `count - 1` before `end`, or `lowest`."""
    position = end
    while count and position > lowest:
        begin = max(lowest, position - MAX_PIECE)
        data = os.pread(descriptor, position - begin, begin)
        if (found := data.count(b"\n")) >= count:
            at = len(data)
            for _ in range(count):
                at = data.rindex(b"\n", 0, at)
            return begin + at + 1
        count, position = count - found, begin
    return lowest if count else end
