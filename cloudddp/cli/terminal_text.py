"""Text that fits the terminal: lines that break at words, and tables. In a pipe or a file every line stays
whole."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from cloudddp.text import one_line

LEAST_CELL = 12  # characters that a column keeps when it is cut
_LEAST = 20  # columns: a narrower terminal is left to break lines itself
_COLUMNS = re.compile(r" {2,}")  # what separates a label from its text
# A command in backticks is not divided: pasted into a shell, each of its lines would be a command.
_WORD = re.compile(r"(?:`[^`]*`|\S)+")


def width_of(stream: TextIO | None) -> int:
    """Return the columns of the terminal that a stream is, COLUMNS first as shells set it; 0 if it is not
    one."""
    try:
        if stream is None or not stream.isatty():
            return 0
        given = os.environ.get("COLUMNS", "")
        if given.isascii() and given.isdigit() and int(given[:6]) > 0:
            return int(given[:6])
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # the terminal is closed
        return 0


def wrapped(text: str, stream: TextIO | None) -> str:
    """Return text whose lines break at words where `stream` is a terminal, with the indent of each line's
    last label."""
    width = width_of(stream)
    if width < _LEAST:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width))


def _pieces(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = _indent(line, width)
    current = line[:indent]
    for found in _WORD.finditer(line, indent):
        word = found.group()
        empty = not current.strip() or len(current) == indent
        if not empty and len(current) + 1 + len(word) > width:
            yield current.rstrip()
            current, empty = " " * indent, True
        current += word if empty else f" {word}"
    yield current


def _indent(line: str, width: int) -> int:
    """Return where the text begins after the labels of a line, such as `  price     `; at most half of the
    width."""
    ends = [found.end() for found in _COLUMNS.finditer(line[: width // 2])]
    start = max(ends, default=0)
    return start + 3 if line.startswith("-> ", start) else start


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    redundant: Sequence[str] = (),
    elastic: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return aligned columns in plain text.

    On a terminal that is too narrow the `redundant` columns are left out, then the `elastic` ones cut, in
    that order, then the `spare` ones left out, in that order. In a pipe or a file every column is whole.
    """
    everything = [[one_line(cell) for cell in row] for row in (header, *rows)]
    if width := width_of(sys.stdout):
        everything = _fitted(everything, width, redundant, elastic, spare)
    widths = _widths(everything)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in everything
    ]
    return "\n".join(line.rstrip() for line in lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _fitted(
    rows: list[list[str]], width: int, redundant: Sequence[str], elastic: Sequence[str], spare: Sequence[str]
) -> list[list[str]]:
    def overflow() -> int:
        widths = _widths(rows)
        return sum(widths) + 2 * (len(widths) - 1) - width

    def leave_out(names: Sequence[str]) -> None:
        nonlocal rows
        for name in names:
            if overflow() > 0:
                at = rows[0].index(name)
                rows = [row[:at] + row[at + 1 :] for row in rows]

    leave_out(redundant)
    for name in elastic:
        if (excess := overflow()) > 0:
            at = rows[0].index(name)
            limit = max(_widths(rows)[at] - excess, LEAST_CELL, len(name))
            rows = [[_cut(cell, limit) if i == at else cell for i, cell in enumerate(row)] for row in rows]
    leave_out(spare)
    return rows


def _cut(cell: str, most: int) -> str:
    return cell if len(cell) <= most else cell[: most - 3] + "..."
