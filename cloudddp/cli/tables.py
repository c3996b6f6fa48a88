"""Text tables that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from cloudddp.text import one_line

LEAST_CELL = 12  # characters that a column keeps when it is cut


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    elastic: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return aligned columns in plain text.

    On a terminal that is too narrow the `elastic` columns are cut, then the `spare` ones left out, in that order. In a
    pipe or a file every column is whole.
    """
    everything = [[one_line(cell) for cell in row] for row in (header, *rows)]
    if width := _terminal_width():
        everything = _fitted(everything, width, elastic, spare)
    widths = _widths(everything)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in everything
    ]
    return "\n".join(line.rstrip() for line in lines)


def _terminal_width() -> int:
    """Return the width of the terminal that stdout is, or 0 if it is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _fitted(
    rows: list[list[str]], width: int, elastic: Sequence[str], spare: Sequence[str]
) -> list[list[str]]:
    def overflow() -> int:
        widths = _widths(rows)
        return sum(widths) + 2 * (len(widths) - 1) - width

    for name in elastic:
        at = rows[0].index(name)
        most = max(_widths(rows)[at] - max(overflow(), 0), LEAST_CELL, len(name))
        rows = [[_cut(cell, most) if i == at else cell for i, cell in enumerate(row)] for row in rows]
    for name in spare:
        if overflow() > 0:
            at = rows[0].index(name)
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return rows


def _cut(cell: str, most: int) -> str:
    return cell if len(cell) <= most else cell[: most - 3] + "..."
