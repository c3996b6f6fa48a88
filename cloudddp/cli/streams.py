"""stdout and stderr that show control characters as text, on a terminal, in a pipe and in a file.

Messages contain values from nodes, tags and files. If each print had to escape them, one would be forgotten;
so every write goes through here. Colours are kept: they are ours, or text.with_colours has allowed them.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from cloudddp import text

_guarded: dict[str, TextIO] = {}  # the streams as they were


class _Guarded(io.TextIOWrapper):
    """Writes text as `text.visible_in_colour` makes it, and `?` for characters that the encoding lacks."""

    def write(self, written: str) -> int:
        super().write(text.visible_in_colour(written))
        return len(written)


def guard() -> None:
    """Wrap sys.stdout and sys.stderr. Streams that are not files (in tests, or closed) are left as they
    are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Guarded):
            stream.flush()
            _guarded[name] = stream
            guarded = _Guarded(
                stream.buffer,
                encoding=stream.encoding,
                errors="replace",
                line_buffering=stream.line_buffering,
            )
            setattr(sys, name, guarded)


def flush() -> None:
    """Write what stdout and stderr still hold; what cannot be written is discarded."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_raw(line: str) -> None:
    """Write a line to stdout without the guard: the terminal interprets its escapes, as the user has asked
    for."""
    sys.stdout.flush()
    stream = _guarded.get("stdout", sys.stdout)
    stream.buffer.write((line + "\n").encode(stream.encoding, "replace"))
    stream.buffer.flush()


def terminal() -> TextIO:
    """Return stderr without the guard, for code that moves the cursor and escapes its text itself."""
    return _guarded.get("stderr", sys.stderr)
