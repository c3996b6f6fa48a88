"""Logging for processes that must not fail when a line cannot be written: a full disk must not stop a
timer."""

from __future__ import annotations

import contextlib
import os


def write(line: str) -> None:
    """Write one line to stderr. Errors are ignored."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def printable(text: str) -> str:
    """Return text that a node may have written, on one line: `?` for what is not printable. cloudddp.text
    does the same for the product, of which the simulator imports errors only."""
    return "".join(c if c.isprintable() else "?" for c in text)
