"""Text tables that fit the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cloudddp.cli.wrap import width_of
from cloudddp.text import one_line

LEAST_CELL = 12  # characters that a column keeps when it is cut


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    redundant: Sequence[str] = (),
    elastic: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return aligned columns in plain text.

    On a terminal that is too narrow the `redundant` columns are left out, then the `elastic` ones cut, in that order,
    then the `spare` ones left out, in that order. In a pipe or a file every column is whole.
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
