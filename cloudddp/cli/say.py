"""What the command line says: words and progress on stderr, data on stdout, and how numbers are written.

Knows nothing of clusters, settings or AWS.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from cloudddp import streams
from cloudddp.text import one_line

LEAST_CELL = 12  # characters that a column keeps when it is cut
VERBS = "up|down|launch|run|logs|jobs|cancel|status|ls|exec|ssh|sync|pull|allow-me"


def colour() -> bool | None:
    """Return False where the user wants no colour (https://no-color.org), else None: click looks at the terminal."""
    return False if os.environ.get("NO_COLOR") else None


how_typed: Callable[[], str] = lambda: "cloudddp"  # noqa: E731  replaced by the session, which knows the options


def in_words_typed(text: str) -> str:
    """Return a hint with `cloudddp VERB` as this user has to type it: with --sim, -c and so on as they were given."""
    typed = how_typed()
    return re.sub(rf"\bcloudddp (?=({VERBS})\b)", lambda _: typed + " ", text)


def note(text: str) -> None:
    """Say something about what is going on: on stderr, never mixed with data. It never fails.

    Where the terminal has gone away, every write is an error, and a teardown must not stop for that.
    """
    try:
        click.secho(in_words_typed(text), err=True, dim=sys.stderr.isatty())
    except (OSError, ValueError):
        pass


class Progress:
    """Says what is being done. On a terminal the current step spins and gets its time; else one line a step."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._console: Any = None
        if self._live:  # not later: the first word may come from a signal handler
            from rich.console import Console

            self._console = Console(file=streams.terminal(), highlight=False, markup=False)
        self._status: Any = None
        self._step = ""
        self._since = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, text: str) -> None:
        """Say the next step. It never fails, and may be called by a signal handler."""
        try:
            self._say(text)
        except (
            Exception
        ):  # the terminal has gone away, or the handler came in between: words must not stop acts
            self._live, self._status = False, None

    def _say(self, text: str) -> None:
        text = one_line(text)  # rich writes past the guard
        if text == self._step:
            return  # a poll that found nothing new
        if not self._live or text.startswith("warning"):
            self._step = text
            note(text)
            return
        self._finish_step()
        self._step, self._since = text, time.monotonic()
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def _finish_step(self) -> None:
        """Leave the step behind as a line of its own, above the spinner (which rich would otherwise overwrite)."""
        if self._step and self._console is not None:
            self._console.print(f"{self._step}  ({time.monotonic() - self._since:.1f} s)", style="dim")

    def stop(self) -> None:
        """End the last step; what is printed next stands on a clean line."""
        try:
            if self._status is not None:
                self._status.stop()
                self._finish_step()
        except (OSError, ValueError):
            pass
        self._status, self._step = None, ""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    elastic: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return aligned columns, in plain text, so that it reads the same in a pipe.

    On a terminal that is too narrow the `elastic` columns are cut, then the `spare` ones left out, in that order.
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
    """Return the width of the terminal on stdout, or 0 where it is none."""
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


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def dollars(amount: float | None) -> str:
    return "price unknown" if amount is None else f"${amount:.2f}"


def duration(seconds: float) -> str:
    """Return a length of time in the two units that matter."""
    seconds = max(int(seconds), 0)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def toml(words: Sequence[str]) -> str:
    """Return a list of words as cloudddp.toml has it."""
    return "[" + ", ".join(json.dumps(word, ensure_ascii=False) for word in words) + "]"


def named(nodes: Iterable[int]) -> str:
    """Return "node 1", "nodes 0, 1"."""
    ranks = sorted(nodes)
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))
