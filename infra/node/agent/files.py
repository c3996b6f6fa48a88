"""The project's files on this node: which of them a sync wrote, and paths that stay inside the project."""

from __future__ import annotations

import os
import stat
from collections.abc import Set
from pathlib import Path
from typing import Optional, Union

from agent import store
from cloudddp.agent.protocol.codec import ProtocolError, decode_mapping
from cloudddp.agent.protocol.manifest import Entry, Manifest, entry_of

TEMPORARY = ".cloudddp-tmp"  # ends the name of a file that is being written


def manifest_file(folder: Path) -> Path:
    return store.ROOT / f"manifest-{folder.name}.json"


def pending_file(folder: Path) -> Path:
    """Return the record of the files that a sync is writing. It exists while the sync lasts; after an interrupted one, until the
    next that changes files."""
    return store.ROOT / f"pending-{folder.name}.json"


def recorded_manifest(folder: Path) -> Manifest:
    """Return what the last sync wrote, and what an interrupted one may have written."""
    known = _read(manifest_file(folder))
    known.update(pending(folder))
    return known


def pending(folder: Path) -> Manifest:
    """Return what an interrupted sync may have written."""
    return _read(pending_file(folder))


def _read(path: Path) -> Manifest:
    try:
        return decode_mapping(store.read_bytes(path), Entry)
    except (OSError, ProtocolError):
        return {}


def current_manifest(folder: Path, folders: Optional[Set[str]] = None) -> Manifest:
    """Return the recorded files that are still there, unchanged in size, time and mode. With `folders`, each file of these is
    looked at; of the others only whether they exist, because their files were equal on both sides."""
    root = f"{folder}/"  # to join Paths takes longer than to look at the files
    exists: dict[str, bool] = {}

    def is_there(path: str, entry: Entry) -> bool:
        parent = path.rpartition("/")[0]
        if folders is None or parent in folders:
            return describe(root + path) == entry
        if parent not in exists:
            exists[parent] = os.path.isdir(root + parent)
        return exists[parent]

    return {path: entry for path, entry in recorded_manifest(folder).items() if is_there(path, entry)}


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
