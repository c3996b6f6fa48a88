"""Parses the stream of `pack` (agent/protocol/files.py) from an untrusted sender as it arrives. Pure: it
opens no file.

It buffers no more than one frame without contents, and passes contents on as they come. It does not interpret
names.
"""

from __future__ import annotations

from typing import Protocol

from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.files import End, Entry, LeftOut, Total, Work

LOOK_WORK = 1024  # bytes that count for a file that the agent has only looked at


class Refused(ValueError):
    """The agent would not send this stream. The message says why."""


class Truncated(Refused):
    """The stream is truncated."""


class Receiver(Protocol):
    """Receives the stream in order: `begin`, the contents of a file in pieces, `end` for a file only."""

    def same(self, numbers: tuple[int, ...]) -> None: ...

    def total(self, total: Total) -> None: ...

    def begin(self, entry: Entry) -> None: ...

    def data(self, piece: memoryview) -> None: ...

    def end(self, end: End) -> None: ...

    def left_out(self, one: LeftOut) -> None: ...


class Reader:
    """Parses the bytes that it is fed, in pieces of any size; close it at the end. Raises Refused, and
    whatever the receiver raises. `compared`: how many bytes the agent may have to compare with files that are
    here."""

    def __init__(self, receiver: Receiver, *, compared: int = 0) -> None:
        self._receiver = receiver
        self._compared = compared
        self._sent = self._entries = self._left_out = 0
        self._work = Work(0, 0)
        self._rest = b""  # the beginning of a frame
        self._magic = False  # whether the beginning of the stream was received
        self._file: Entry | None = None  # the file that is being received
        self._left = 0  # bytes of it that are still expected
        self._piece = 0  # bytes that are left of a frame with contents
        self._finished = False

    @property
    def amount(self) -> int:
        """What has come so far, in bytes, with a limit for what the agent says that it has read."""
        read = min(self._work.files, files.MAX_ENTRIES) * LOOK_WORK + min(self._work.size, self._compared)
        return self._sent + read

    def feed(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, view = 0, memoryview(data)
        while count := self._step(data, view, at):
            at += count
        self._rest = data[at:]

    def close(self) -> None:
        if not self._finished:
            where = f" in the middle of {self._file.name!r}" if self._file else ""
            raise Truncated(f"the stream is truncated{where}")

    def _step(self, data: bytes, view: memoryview, at: int) -> int:
        """Consume some bytes from `at` on and return how many; 0 if more are needed."""
        if self._piece:
            piece = view[at : at + self._piece]
            if piece:
                self._piece -= len(piece)
                self._sent += len(piece)
                self._receiver.data(piece)
            return len(piece)
        if not self._magic:
            return self._begin(data)
        if len(data) - at < files.PREFIX.size:
            return 0
        kind: bytes
        length: int
        kind, length = files.PREFIX.unpack_from(data, at)
        if self._finished:
            raise Refused("the stream continues after its end")
        if length > files.LONGEST.get(kind, -1):
            raise Refused(f"a frame of kind {kind!r} and {length} bytes is announced")
        if kind == files.DATA:
            self._announce(length)
            return files.PREFIX.size
        end = at + files.PREFIX.size + length
        if len(data) < end:
            return 0
        try:
            self._frame(kind, data[end - length : end])
        except ProtocolError as error:
            raise Refused(str(error)) from None
        return end - at

    def _begin(self, data: bytes) -> int:
        if data[: len(files.MAGIC)] != files.MAGIC[: len(data)]:
            raise Refused("it is not a stream of files")
        if len(data) < len(files.MAGIC):
            return 0
        self._magic = True
        self._sent += len(files.MAGIC)
        return len(files.MAGIC)

    def _announce(self, length: int) -> None:
        if self._file is None:
            raise Refused("contents belong to no file")
        if length > self._left:
            raise Refused(f"{self._file.name!r} is longer than announced")
        self._left -= length
        self._piece = length

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if kind == files.END:
            self._end(files.decode_end(payload))
        elif kind == files.WAIT:
            self._work = files.decode_wait(payload)
            return
        elif self._file is not None:
            raise Refused(f"{self._file.name!r} has no end")
        elif kind == files.ENTRY:
            entry = files.decode_entry(payload)
            self._entries += 1
            if self._entries > files.MAX_ENTRIES:
                raise Refused(f"there are more than {files.MAX_ENTRIES:,} files")
            if entry.kind == files.FILE:
                self._file, self._left = entry, entry.size - entry.offset
            self._receiver.begin(entry)
        elif kind == files.SAME:
            self._receiver.same(files.decode_same(payload))
        elif kind == files.TOTAL:
            self._receiver.total(files.decode_total(payload))
        elif kind == files.OUT:
            self._left_out += 1
            if self._left_out > files.MAX_LEFT_OUT + 1:
                raise Refused(f"more than {files.MAX_LEFT_OUT:,} files are left out")
            self._receiver.left_out(files.decode_left_out(payload))
        else:
            self._finished = True
        self._sent += len(payload)

    def _end(self, end: End) -> None:
        if self._file is None:
            raise Refused("an end belongs to no file")
        if self._left and end.state != files.GIVEN_UP:
            raise Refused(f"{self._file.name!r} is shorter than announced")
        self._file, self._left = None, 0
        self._receiver.end(end)
