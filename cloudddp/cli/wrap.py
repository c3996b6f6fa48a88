"""Text on a terminal: how wide it is, and lines that break at words. In a pipe or a file every line stays whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TextIO

_LEAST = 20  # columns: a narrower terminal is left to break lines itself
_COLUMNS = re.compile(r" {2,}")  # what separates a label from its text
# A command in backticks is not divided: pasted into a shell, each of its lines would be a command.
_WORD = re.compile(r"(?:`[^`]*`|\S)+")


def width_of(stream: TextIO | None) -> int:
    """Return the columns of the terminal that a stream is, COLUMNS first as shells set it; 0 if it is not one."""
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
    """Return text whose lines break at words where `stream` is a terminal, with the indent of each line's last label."""
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
    """Return where the text begins after the labels of a line, such as `  price     `; at most half of the width."""
    ends = [found.end() for found in _COLUMNS.finditer(line[: width // 2])]
    start = max(ends, default=0)
    return start + 3 if line.startswith("-> ", start) else start
