"""Parses a tar stream from an untrusted sender as it arrives. Pure: it opens no file.

tarfile accepts many formats, reads headers of any announced size into memory, and skips what it cannot read. This
reader accepts only what our agent sends (GNU format: files, folders, symbolic links, long names) and buffers no
more than one name. It does not interpret the names.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import Literal, Protocol

MAX_PATH = 4096  # bytes of a name or a link's target (Linux: PATH_MAX)
_BLOCK = tarfile.BLOCKSIZE
_KINDS: dict[bytes, Literal["file", "folder", "link"]] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
}
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_OTHERS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.CONTTYPE: "a contiguous file",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.XHDTYPE: "an extended header",
    tarfile.XGLTYPE: "an extended header",
}


class Refused(ValueError):
    """The agent would not send this stream. The message says why."""


class Truncated(Refused):
    """The stream is truncated."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of the stream. Bytes of a name that are not UTF-8 become lone surrogates, as in os.fsdecode."""

    name: str
    kind: Literal["file", "folder", "link"]
    size: int  # bytes; 0 except for files
    mode: int
    mtime: int  # seconds since the epoch; any number
    target: str  # of a link, otherwise ""


class Receiver(Protocol):
    """Receives the members of a stream in order: `begin`, the contents of a file in pieces, `end`."""

    def begin(self, member: Member) -> None: ...

    def data(self, piece: memoryview) -> None: ...

    def end(self) -> None: ...


class Reader:
    """Parses the bytes that it is fed, in pieces of any size; close it at the end. Raises Refused, and whatever the
    receiver raises."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._block = bytearray()  # a header, as far as it was received
        self._long: dict[bytes, bytearray] = {}  # names too long for a header, by the kind of their block
        self._member: Member | None = None  # the file that is being received
        self._into: bytearray | None = None  # the long name that is being received
        self._left = 0  # bytes of contents still expected
        self._padding = 0  # bytes after them, up to a whole block
        self._trailing = -1  # bytes received after the end of the archive; -1 before it

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._step(view) :]

    def close(self) -> None:
        if self._trailing < 0:
            where = f" in the middle of {self._member.name!r}" if self._member else ""
            raise Truncated(f"the stream is truncated{where}")

    def _step(self, view: memoryview) -> int:
        """Consume some bytes at the beginning of `view` and return how many."""
        if self._trailing >= 0:
            return self._trailer(view)
        if self._left:
            return self._contents(view[: self._left])
        if self._padding:
            count = min(self._padding, len(view))
            self._padding -= count
            return count
        count = min(_BLOCK - len(self._block), len(view))
        self._block += view[:count]
        if len(self._block) == _BLOCK:
            block, self._block = bytes(self._block), bytearray()
            self._header(block)
        return count

    def _trailer(self, view: memoryview) -> int:
        self._trailing += len(view)
        if self._trailing > 2 * tarfile.RECORDSIZE or any(view):
            raise Refused("the stream continues after its end")
        return len(view)

    def _contents(self, piece: memoryview) -> int:
        self._left -= len(piece)
        if self._into is not None:
            self._into += piece
        else:
            self._receiver.data(piece)
        if not self._left:
            self._into = None
            self._finish()
        return len(piece)

    def _finish(self) -> None:
        if self._member is not None:
            self._member = None
            self._receiver.end()

    def _header(self, block: bytes) -> None:
        if not any(block):
            if self._long:
                raise Refused("a long name belongs to no file")
            self._trailing = 0
            return
        try:
            found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise Refused("it is not a tar stream, or is damaged") from None
        if found.size < 0:
            raise Refused("a size is negative")
        self._left = found.size
        self._padding = -found.size % _BLOCK
        if found.type in _LONG:
            self._begin_long(found)
        else:
            self._begin(found)

    def _begin_long(self, found: tarfile.TarInfo) -> None:
        if found.type in self._long:
            raise Refused("a file has two long names")
        if not 0 < found.size <= MAX_PATH + 1:  # with its final NUL
            raise Refused(f"a name of {found.size} bytes is announced")
        self._into = self._long[found.type] = bytearray()

    def _begin(self, found: tarfile.TarInfo) -> None:
        name = self._text(tarfile.GNUTYPE_LONGNAME, found.name)
        target = self._text(tarfile.GNUTYPE_LONGLINK, found.linkname)
        self._long = {}
        kind = _KINDS.get(found.type)
        if kind is None:
            raise Refused(f"{name!r} is {_OTHERS.get(found.type, 'of an unknown kind')}")
        if kind != "file" and found.size:
            raise Refused(f"{name!r} is a {kind} with contents")
        member = Member(
            name, kind, found.size, found.mode, int(found.mtime), target if kind == "link" else ""
        )
        self._member = member
        self._receiver.begin(member)
        if not found.size:
            self._finish()

    def _text(self, kind: bytes, short: str) -> str:
        raw = self._long.get(kind)
        if raw is None:
            return short
        text = raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        return text.rstrip("/") if kind == tarfile.GNUTYPE_LONGNAME else text
