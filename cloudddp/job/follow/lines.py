"""Cuts a rank's log into lines as a terminal would show them. Pure. Memory is bounded for any output."""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE = 1 << 16  # bytes; longer lines are split


def split(partial: bytes, data: bytes, *, last: bool = False) -> tuple[list[str], bytes]:
    """Return the lines that are complete after `partial + data`, and the bytes after the last line break.

    `last`: no more data follows, so that those bytes are a line, too. Bytes that are not UTF-8 become U+FFFD, and of
    what a `\\r` overwrites only the final text is kept.
    """
    lines: list[str] = []
    end = data.rfind(b"\n") + 1
    if end:
        lines += _lines((partial + data[:end]).decode("utf-8", errors="replace"))
        partial = b""
    rest = bytearray(partial + data[end:])
    while len(rest) > MAX_LINE:
        cut = _character_boundary(rest, MAX_LINE)
        lines += _lines(rest[:cut].decode("utf-8", errors="replace") + "\n")
        del rest[:cut]
    if last and rest:
        lines += _lines(rest.decode("utf-8", errors="replace") + "\n")
        rest.clear()
    return lines, bytes(rest)


class LineSplitter:
    """Splits one stream into lines, as `split` does."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes, *, last: bool = False) -> list[str]:
        """Return the lines that are complete; with `last` also the one without a line break."""
        lines, self._partial = split(self._partial, data, last=last)
        return lines


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n")[:-1]:
        shown = line.rstrip("\r").rsplit("\r", 1)[-1] if "\r" in line else line
        if len(shown) <= MAX_LINE:
            yield shown
            continue
        for start in range(0, len(shown), MAX_LINE):
            yield shown[start : start + MAX_LINE]


def _character_boundary(data: bytearray, cut: int) -> int:
    """Return the largest index up to `cut` that splits no UTF-8 character, or `cut` where the data is not UTF-8."""
    return next((at for at in range(cut, cut - 4, -1) if data[at] & 0xC0 != 0x80), cut)
