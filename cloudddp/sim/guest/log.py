"""Log lines of processes that must go on when nobody can take the line: a full disk must not stop a timer."""

from __future__ import annotations

import contextlib
import os


def say(line: str) -> None:
    """Write one line to stderr; it is lost where it cannot be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))
