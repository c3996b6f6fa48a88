"""Where a secret would be seen: files that hold it, and the command lines of all processes."""

from __future__ import annotations

import contextlib
from pathlib import Path


def files_with(text: str, *folders: Path) -> list[Path]:
    """Return the files below these folders that hold a text."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):  # it has gone
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found
