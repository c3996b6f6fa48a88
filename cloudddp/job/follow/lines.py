r"""Cuts a rank's log into lines as a terminal would show them. Pure. Memory is bounded for any output.

Of what a `\r` overwrites only the final text is kept. Bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cloudddp.text import size_of

MAX_LINE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class OpenLine:
    """A line that is not complete: at most MAX_LINE bytes of it, as far as they are not overwritten."""

    data: bytes = b""
    hidden: int = 0  # bytes after `data` that were not kept
    overwritten: bool = False  # a `\r` has removed text before it: most likely a progress bar

    @property
    def text(self) -> str:
        """The line as it is now; the end of a long one is replaced by its size."""
        shown = self.data.rstrip(b"\r").decode("utf-8", errors="replace")
        return f"{shown} [line cut: {size_of(self.hidden)} more]" if self.hidden else shown

    def extended(self, data: bytes) -> OpenLine:
        """Return the line with more bytes, which contain no line break."""
        body = data.rstrip(b"\r")
        if not body:  # a `\r` overwrites nothing before other text follows it
            return replace(self, data=self.data.rstrip(b"\r") + data[:1]) if data else self
        at = body.rfind(b"\r")
        line = OpenLine(overwritten=True) if at >= 0 or self.data.endswith(b"\r") else self
        kept, hidden = line.data, line.hidden + len(body)
        if not line.hidden:
            full = line.data + body[at + 1 :]
            kept = full if len(full) <= MAX_LINE else full[: _character_boundary(full, MAX_LINE)]
            hidden = len(full) - len(kept)
        return OpenLine(kept + data[len(body) :][:1], hidden, line.overwritten)


def split(line: OpenLine, data: bytes, *, last: bool = False) -> tuple[list[str], OpenLine]:
    """Return the lines that are complete after `line` and then `data`, and the one that follows them. `last`:
    no more data follows. Lines longer than MAX_LINE end with a note about what was cut."""
    found: list[str] = []
    first, end = data.find(b"\n") + 1, data.rfind(b"\n") + 1
    if end:
        found.append(line.extended(data[: first - 1]).text)
        found += _lines(data[first:end])
        line = OpenLine()
    line = line.extended(data[end:])
    if last and line.data:
        found.append(line.text)
        line = OpenLine()
    return found, line


def _lines(data: bytes) -> Iterator[str]:
    """Yield complete lines. All at once where that is possible, since a rank may write 100,000 per second."""
    if len(data) <= MAX_LINE and b"\r" not in data:
        yield from data.decode("utf-8", errors="replace").split("\n")[:-1]
        return
    for line in data.split(b"\n")[:-1]:
        yield OpenLine().extended(line).text


class LineSplitter:
    """Splits a command's output into lines. Nothing is cut: a line that is longer than MAX_LINE becomes
    several. Bytes that are not UTF-8 become lone surrogates, as in os.fsdecode."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes, *, last: bool = False) -> list[str]:
        """Return the lines that are complete; with `last` also the one without a line break."""
        *complete, rest = (self._partial + data).split(b"\n")
        *full, self._partial = _pieces(rest)
        found = [piece for line in complete for piece in _pieces(line)] + full
        if last and self._partial:
            found.append(self._partial)
            self._partial = b""
        shown = (OpenLine().extended(piece).data.rstrip(b"\r") for piece in found)
        return [piece.decode("utf-8", errors="surrogateescape") for piece in shown]


def _pieces(line: bytes) -> Iterator[bytes]:
    while len(line) > MAX_LINE:
        cut = _character_boundary(line, MAX_LINE)
        yield line[:cut]
        line = line[cut:]
    yield line


def _character_boundary(data: bytes, cut: int) -> int:
    """Return the largest index up to `cut` that splits no character, `cut` where the data is not UTF-8."""
    return next((at for at in range(cut, cut - 4, -1) if data[at] & 0xC0 != 0x80), cut)
