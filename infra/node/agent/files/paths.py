"""Files of the project on this node, and paths that stay inside it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Optional, Union

from cloudddp.agent.protocol.manifest import Entry, entry_of

TEMPORARY = ".cloudddp-tmp"  # ends the name of a file that is being written
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # flags with which a folder is opened
_OF_SYNC = re.compile(r"\.[0-9a-f]{8}-[0-9]+" + re.escape(TEMPORARY))  # as ProjectWriter names them


def describe(path: Union[str, Path]) -> Optional[Entry]:
    """Return the manifest's entry for a file or a link, None for anything else."""
    try:
        info = os.lstat(path)
        return entry_of(info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else "")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def remove_temporaries(folder: Path, folders: Iterable[str]) -> None:
    """Delete temporary files of a sync that was killed, in these folders below `folder`. Symbolic links are
    not followed. Folders that no longer exist are skipped."""
    for name in folders:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            at: Optional[int] = None
            for part in (str(folder), *filter(None, name.split("/"))):
                at = os.open(part, FOLDER, dir_fd=at)
                opened.callback(os.close, at)
            for left in os.listdir(at):
                if _OF_SYNC.fullmatch(left):
                    os.unlink(left, dir_fd=at)


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
