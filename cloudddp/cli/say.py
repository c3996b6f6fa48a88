"""What the command line says: words and progress on stderr, data on stdout, and how numbers are written.

Knows nothing of clusters, settings or AWS.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

VERBS = "up|down|launch|run|logs|jobs|cancel|status|ls|exec|ssh|sync|pull|allow-me"

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

            self._console = Console(stderr=True, highlight=False, markup=False)
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, in plain text, so that it reads the same in a pipe."""
    everything = [[cell.replace("\n", "\\n") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in everything
    ]
    return "\n".join(line.rstrip() for line in lines)


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


def size(count: int) -> str:
    """Return a number of bytes in the unit that fits."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
