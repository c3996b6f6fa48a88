"""Files of the project on this node, and paths that stay inside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Optional, Union

from cloudddp.agent.protocol.manifest import Entry, entry_of


def describe(path: Union[str, Path], folder: Optional[int] = None) -> Optional[Entry]:
    """Return the manifest's entry for a file or a link, None for anything else. `folder`: the open one to
    which the path is relative."""
    try:
        info = os.lstat(path, dir_fd=folder)
        return entry_of(info, os.readlink(path, dir_fd=folder) if stat.S_ISLNK(info.st_mode) else "")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def inside(folder: Path, name: str) -> Path:
    """Return folder/name. Refuses a name that leaves the folder."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in name:
        raise SystemExit(f"refused a name outside the project: {name!r}")
    return folder / name


def link_to(project: Path, name: str, folder: Path, section: str) -> None:
    """Make a path in the project a link to a folder. Raises OSError, also where the project has something
    else there."""
    link = inside(project, name)
    if link.is_symlink():
        if link.readlink() == folder:
            return
        link.unlink()
    elif link.exists():
        raise FileExistsError(f"{section} path = {name}: the project has a file or folder there")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def on_one_line(text: str) -> str:
    """Return a name with line breaks, control characters and bytes that are not UTF-8 escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
