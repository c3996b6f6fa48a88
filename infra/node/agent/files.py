"""Files of the project on this node, and paths that stay inside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Optional, Union

from cloudddp.agent.protocol.manifest import Entry, entry_of

TEMPORARY = ".cloudddp-tmp"  # ends the name of a file that is being written


def describe(path: Union[str, Path]) -> Optional[Entry]:
    """Return the manifest's entry for a file or a link, None for anything else."""
    try:
        info = os.lstat(path)
        return entry_of(info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else "")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def temporary(path: Path) -> Path:
    """Return where a file is written before it gets its name. One that a killed process has left is no snapshot and no
    result."""
    return path.with_name(f".{os.getpid()}{TEMPORARY}")


def inside(folder: Path, name: str) -> Path:
    """Return folder/name. Refuses a name that leaves the folder."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in name:
        raise SystemExit(f"refused a name outside the project: {name!r}")
    return folder / name


def replaceable(folder: Path, name: str) -> Path:
    """Return folder/name for writing. A link on the way, which may lead out of the folder, is removed."""
    target = inside(folder, name)
    path = folder
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()  # it was a link or a file before, and is a folder now
    return target
