"""What a terminal of 80 x 24 shows of a command, with all that has scrolled out of it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pyte
from support.terminal import Terminal

COLUMNS, LINES = 80, 24
SPINNER = re.compile("[\u2800-\u28ff]")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# What differs from run to run -> what stands for it, of the same length where columns are aligned by it.
_CHANGING = (
    (r"\b20\d{6}-\d{6}-[0-9a-z]{4}\b", "20261127-101500-5d1e"),
    (r"\bc-[0-9a-f]{10}\b", "c-0123456789"),
    (r"\b(i|pg|sg|key)-[0-9a-f]{17}\b", r"\1-0123456789abcdef0"),
    (r"\b20\d\d-\d\d-\d\d \d\d:\d\d UTC\b", "2026-11-27 12:15 UTC"),
    (r"\b\d{1,3}(\.\d{1,3}){3}\b", "10.0.0.10"),
    (r"\(\d+(\.\d)? s\)", "(1.0 s)"),
    (r"\bin \d+ h \d\d min\b", "in 1 h 59 min"),
    (r"\b(\d+ min )?\d+ s\b(?! per node)", "5 s"),
    (r"\b\d+ files, [\d.]+ (bytes|KiB), to\b", "9 files, 1000 bytes, to"),
    (r"\$\d+\.\d+ (so far|on AWS)", r"$0.00 \1"),
    (r"\$\d+\.\d+ until", "$4.19 until"),
)


class Recording:
    """The screens of commands that were run one after another on one terminal."""

    def __init__(self) -> None:
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=10_000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self._shown = ""

    def run(self, cli: Any, *words: str, **more: Any) -> int:
        """Run a command to its end, and return its exit code. `more`: as of `Terminal`."""
        self._stream.feed(f"$ cloudddp {' '.join(words)}\r\n".encode())
        window = Terminal(cli, *words, **more)
        code, shown = window.read_to_the_end()
        self._stream.feed(shown.encode())
        self._shown += shown
        return code

    def broken_words(self) -> list[str]:
        """Return the rows in which the terminal broke a line that was too long, but for lines of ranks, which
        are shown as they are."""
        whole = {line.rpartition("\r")[2] for line in _ESCAPES.sub("", self._shown).split("\r\n")}
        rows = self.rows()
        return [
            f"{row}|{below}"
            for row, below in itertools.pairwise(rows)
            if len(row) == COLUMNS and below[:1].strip() and row not in whole and not row.startswith("[")
        ]

    def rows(self) -> list[str]:
        """Return every row, also those that have scrolled out, without trailing spaces."""
        width = self._screen.columns
        above = ["".join(row[at].data for at in range(width)) for row in self._screen.history.top]
        rows = [row.rstrip() for row in (*above, *self._screen.display)]
        while rows and not rows[-1]:
            rows.pop()
        return rows


def steady(text: str) -> str:
    """Return the text with what changes from run to run replaced."""
    for pattern, stand_in in _CHANGING:
        text = re.sub(pattern, stand_in, text)
    return text
