"""What the agent's `follow` writes, cut into frames, and a log cut into lines. Pure: bytes in, records out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cloudddp.protocol import (
    LAUNCHER,
    MAX_COUNT,
    MAX_PIECE,
    MAX_RANK,
    MAX_RANKS,
    MAX_STATE,
    End,
    JobState,
    Log,
    ProtocolError,
    decode,
)

Frame = Log | JobState | End

MAX_LINE = 1 << 16  # bytes of a log's line; a longer one is shown in pieces

_LOG = re.compile(rb"log (-?[0-9]{1,6}) ([0-9]{1,16}) ([0-9]{1,6})\Z")


class Frames:
    """Cuts the agent's byte stream into frames. It never holds more than one frame and the bytes just fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0  # bytes of the buffer in which there is no line break
        self._ranks: set[int] = set()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError for bytes that no agent sends."""
        self._buffer += data
        while (cut := self._buffer.find(b"\n", self._seen)) >= 0:
            frame, end = self._frame(bytes(self._buffer[:cut]), cut + 1)
            if end > len(self._buffer):
                self._seen = cut
                return
            del self._buffer[:end]
            self._seen = 0
            if frame is not None:
                yield frame
        self._seen = len(self._buffer)
        if self._seen > MAX_STATE:
            raise ProtocolError(f"a frame is longer than {MAX_STATE} bytes")

    def _frame(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        """Return the frame that begins with `line`, if there is one, and where it ends in the buffer."""
        if line.startswith(b"log "):
            return self._log(line, start)
        if line.startswith(b"state "):
            return decode(line[6:], JobState, limit=MAX_STATE), start
        if line == b"end":
            return End(), start
        if line == b"beat":
            return None, start
        raise ProtocolError(f"it begins a frame with {line[:20]!r}")

    def _log(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        words = _LOG.match(line)
        if words is None:
            raise ProtocolError(f"a log frame has the header {line[:60]!r}")
        rank, offset, length = (int(word) for word in words.groups())
        if not (LAUNCHER <= rank <= MAX_RANK and offset <= MAX_COUNT and length <= MAX_PIECE):
            raise ProtocolError(f"a log frame is out of range: {line.decode()}")
        self._ranks.add(rank)
        if len(self._ranks) > MAX_RANKS + 1:
            raise ProtocolError(f"it has logs of more than {MAX_RANKS} ranks")
        end = start + length
        return (
            (Log(rank, offset, bytes(self._buffer[start:end])), end)
            if end <= len(self._buffer)
            else (None, end)
        )


class Lines:
    """One rank's log, cut into lines as they become complete. A line of more than MAX_LINE bytes comes in pieces."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[str]:
        """Yield the complete lines; with `last` also what no line break follows."""
        end = data.rfind(b"\n") + 1
        if end:
            yield from _lines((bytes(self._partial) + data[:end]).decode("utf-8", errors="replace"))
            self._partial = bytearray()
        self._partial += data[end:]
        while len(self._partial) > MAX_LINE:
            cut = _character_boundary(self._partial, MAX_LINE)
            yield from _lines(self._partial[:cut].decode("utf-8", errors="replace") + "\n")
            del self._partial[:cut]
        if last and self._partial:
            yield from _lines(self._partial.decode("utf-8", errors="replace") + "\n")
            self._partial = bytearray()


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text that ends with a line break, as a terminal would show them: what a `\\r` overwrote is
    left out."""
    for line in text.split("\n")[:-1]:
        shown = line.rstrip("\r").rsplit("\r", 1)[-1] if "\r" in line else line
        if len(shown) <= MAX_LINE:
            yield shown
            continue
        for start in range(0, len(shown), MAX_LINE):
            yield shown[start : start + MAX_LINE]


def _character_boundary(data: bytearray, cut: int) -> int:
    """Return the nearest index up to `cut` at which no UTF-8 character is cut apart; `cut` where it is not UTF-8."""
    return next((at for at in range(cut, cut - 4, -1) if data[at] & 0xC0 != 0x80), cut)
