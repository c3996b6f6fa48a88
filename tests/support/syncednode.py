"""A node that is synced as the laptop does, and what its project has."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from support.localsync import LocalCluster

from cloudddp.config.spec import Config, JobSpec

UP_TO_DATE = "files are up to date"
UPDATED = "updating names, modes and links on 1 node; nothing is sent from this computer"


class SyncedNode:
    """One node that is synced as the laptop does."""

    def __init__(self, folder: Path) -> None:
        self.cluster = LocalCluster(folder, 1)
        self.node = self.cluster.nodes[0]
        self.project = self.node.project

    def sync(self, here: Path) -> str:
        """Sync the node; return what the user gets to read."""
        return "; ".join(self.cluster.sync(here, Config(job=JobSpec(outputs=("runs",)))))


def put(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def tree(root: Path, *, leave_out: str = "runs") -> dict[str, Any]:
    """Return the properties of the files and links below a folder that a sync transfers."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != leave_out]
        for name in [*files, *(n for n in folders if (Path(folder) / n).is_symlink())]:
            path = Path(folder) / name
            info = path.lstat()
            key = str(path.relative_to(root))
            if stat.S_ISLNK(info.st_mode):
                found[key] = ("link", os.fspath(path.readlink()))
            else:
                found[key] = (path.read_bytes(), bool(info.st_mode & 0o100), info.st_mtime_ns)
    return found
