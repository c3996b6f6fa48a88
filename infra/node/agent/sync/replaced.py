"""What jobs wrote where a sync writes: it is kept in a folder of the project, and never overwritten or
deleted.

A rename keeps it, so it takes no space but its own. As any new file of a job, it is pulled by default, and
counts as not pulled until then. A link is not kept: it has no contents.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from agent.files import records
from cloudddp.agent.protocol.file_steps import REPLACED


def set_aside(project: Path, names: Iterable[str]) -> list[str]:
    """Move files or folders of the project there, and return those that were moved; copies stay known as
    such. A file that a rank begins to write at that moment keeps its place. Raises OSError."""
    results, folder = records.results(project), folder_name()
    moved, copies = [], dict[str, records.Writer]()
    for name in names:
        path, target = project / name, project / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            before = os.lstat(path)
            os.rename(path, target)
            after = os.lstat(target)
            if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
                os.rename(target, path)
                continue
            moved.append(name)
            copies |= results.moved(name, folder)
    if copies:
        records.keep_copies(project, copies)
    return moved


def folder_name() -> str:
    return f"{REPLACED}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
