"""How text is written: numbers, times and lists in messages; lines and tables that fit the terminal. In a
pipe or a file every line stays whole. Nothing is printed here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from cloudddp.text import columns, one_line

_DAY = 86400.0  # seconds
_SHOWN_REGIONS = 3


def dollars(amount: float | None) -> str:
    return "price unknown" if amount is None else f"${amount:.2f}"


def duration(seconds: float) -> str:
    """Return a length of time in the two units that matter."""
    seconds = max(int(seconds), 0)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"


def format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def credentials_end(ends: datetime | None) -> str:
    """Return when credentials end, as a sentence without a full stop; '' if that is more than a day ahead."""
    left = (ends - datetime.now(UTC)).total_seconds() if ends else _DAY + 1
    if ends is None or left > _DAY:
        return ""
    return (
        f"credentials end in {duration(left)}, at {format_time(ends)}"
        if left > 0
        else "credentials have ended"
    )


def region_list(names: Sequence[str]) -> str:
    """Return the names of regions; of five or more, the first three and the number of the others."""
    more = len(names) - _SHOWN_REGIONS
    return ", ".join(names) if more < 2 else f"{', '.join(names[:_SHOWN_REGIONS])} and {more} other regions"


def plural(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def from_here(path: Path) -> str:
    """Return a path relative to the current folder, if it is below that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def toml(words: Sequence[str]) -> str:
    """Return a list of strings in TOML syntax."""
    return "[" + ", ".join(json.dumps(word, ensure_ascii=False) for word in words) + "]"


LEAST_CELL = 8  # characters that a column keeps when it is cut
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
    if columns(line) <= width:
        yield line
        return
    indent = _indent(line, width)
    current = line[:indent]
    for found in _WORD.finditer(line, indent):
        word = found.group()
        empty = not current.strip() or len(current) == indent
        if not empty and columns(current) + 1 + columns(word) > width:
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
    width: int | None = None,
) -> str:
    """Return aligned columns in plain text.

    On a terminal (or a `width`) that is too narrow the `redundant` columns are left out, then the `elastic`
    ones cut, in that order, then the `spare` ones left out, in that order. In a pipe or a file every column
    is whole.
    """
    everything = [[one_line(cell) for cell in row] for row in (header, *rows)]
    if width := width_of(sys.stdout) if width is None else width:
        everything = _fitted(everything, width, redundant, elastic, spare)
    widths = _widths(everything)
    lines = [
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True))
        for row in everything
    ]
    return "\n".join(line.rstrip() for line in lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(columns, column)) for column in zip(*rows, strict=True)]


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
            rows = [[cut(cell, limit) if i == at else cell for i, cell in enumerate(row)] for row in rows]
    leave_out(spare)
    return rows


def cut(cell: str, most: int) -> str:
    """Return a text of at most so many columns."""
    if columns(cell) <= most:
        return cell
    end = len(cell)
    while columns(cell[:end]) > most - 3:
        end -= 1
    return cell[:end] + "..."
