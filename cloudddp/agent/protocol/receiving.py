"""The frames of a transfer -> files: on a node to which a laptop or another node sends, and on a laptop.

Each file is compared with the hash of the whole file as its sender has read it, so it is never a mix of two
versions. What no sender may send raises ProtocolError; a file that was begun stays, for a later transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Protocol

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.transfer import FileHead, Frame
from cloudddp.agent.protocol.writing import Incoming

MAX_RESTARTS = 10  # of one file, which was changing while it was read
MAX_GROWTH = 1 << 30  # bytes of a file beyond its size when it was listed: a log grows


class FileTarget(Protocol):
    """Where files go, by their index in the listing. Its methods may raise OSError."""

    def begin(self, number: int, offset: int) -> Incoming:
        """Open a file that begins to arrive, with its first `offset` bytes, which are here; 0: empty."""

    def finish(self, head: FileHead, incoming: Incoming) -> None:
        """Close a file that is complete, and give it its name."""

    def confirm(self, head: FileHead) -> bool:
        """Return whether the file in its place is the one that the head describes, and take it."""

    def gone(self, head: FileHead) -> None:
        """Note that the sender no longer has the file."""


class Receiver:
    """Takes the frames of the files that were asked for. `missing` are those that have not come yet, with
    their sizes when they were listed; `received` is the number of bytes of contents that have."""

    def __init__(self, wanted: Mapping[int, int], target: FileTarget) -> None:
        self.missing = dict(wanted)
        self.received = 0
        self._target = target
        self._open: Optional[tuple[int, Incoming]] = None
        self._restarts = 0

    def take(self, frame: Frame) -> None:
        """Raises ProtocolError, OSError."""
        if frame.kind == transfer.PART:
            self._part(*transfer.read_part(frame))
        elif frame.kind == transfer.FILE_END:
            self._end(*transfer.read_end(frame))
        else:
            raise ProtocolError("it sent a frame that does not belong here")

    def done(self) -> None:
        """The sender has sent everything. Raises ProtocolError where something is missing."""
        if self._open is not None:
            raise ProtocolError(f"file {self._open[0]} has no end")
        if self.missing:
            raise ProtocolError(f"{len(self.missing)} files were not sent, and not said to be missing")

    def close(self) -> None:
        """Leave a file that was begun, for a later transfer."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _asked(self, number: int) -> None:
        if number not in self.missing:
            raise ProtocolError(f"file {number} was not asked for, or has come before")
        if self._open is not None and self._open[0] != number:
            raise ProtocolError(f"file {self._open[0]} has no end")

    def _part(self, number: int, offset: int, data: bytes) -> None:
        self._asked(number)
        if not data:
            raise ProtocolError("it sent a part without contents")
        self._write(number, offset, data)

    def _write(self, number: int, offset: int, data: bytes) -> Incoming:
        if self._open is None:
            self._open, self._restarts = (number, self._target.begin(number, offset)), 0
        incoming = self._open[1]
        if offset == 0 and incoming.written:  # the file was changing while it was read
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                raise ProtocolError(f"file {number} begins again and again")
            incoming.restart()
        if offset != incoming.written:
            raise ProtocolError(f"a part of file {number} is missing")
        if offset + len(data) > self.missing[number] + MAX_GROWTH:
            raise ProtocolError(f"file {number} is much longer than it was when it was listed")
        incoming.write(memoryview(data))
        self.received += len(data)
        return incoming

    def _end(self, head: FileHead, data: bytes) -> None:
        self._asked(head.number)
        if len(data) > head.size:
            raise ProtocolError(f"file {head.number} is longer than it says")
        if head.missing or head.deleted:
            self.close()  # it no longer exists, perhaps after parts of it
            self._target.gone(head)
        elif self._open is not None or data or not head.size or not self._target.confirm(head):
            incoming = self._write(head.number, head.size - len(data), data)
            if not incoming.is_(head):
                raise ProtocolError(f"file {head.number} differs from what its sender has read")
            self._open = None
            self._target.finish(head, incoming)
        del self.missing[head.number]
