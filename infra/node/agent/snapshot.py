"""`snapshot`: the newest valid snapshot on this node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
from pathlib import Path

from agent import store
from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.agent.protocol.snapshots import MAX_PATTERNS, SnapshotReply, SnapshotRequest

REQUEST = SnapshotRequest
PIECE = 1 << 20  # bytes


def step(request: SnapshotRequest) -> SnapshotReply:
    project = store.project_folder(request.project)
    excluded = set(request.exclude)
    found: dict[str, tuple[int, int]] = {}
    for pattern in request.patterns:
        for path in project.glob(pattern):
            name = path.relative_to(project).as_posix()
            with contextlib.suppress(OSError, UnicodeEncodeError):
                name.encode()
                info = os.lstat(path)
                if stat.S_ISREG(info.st_mode) and len(name) <= MAX_PATH and name not in excluded:
                    found[name] = (max(info.st_mtime_ns, 0), info.st_size)
    skipped: list[str] = []
    for name, (mtime_ns, size) in sorted(found.items(), key=lambda item: item[1], reverse=True):
        with contextlib.suppress(OSError):
            if is_valid(project / name):
                return SnapshotReply(
                    name, mtime_ns, size, digest(project / name), tuple(skipped[:MAX_PATTERNS])
                )
        skipped.append(name)
    return SnapshotReply(skipped=tuple(skipped[:MAX_PATTERNS]))


def is_valid(path: Path) -> bool:
    """Whether a file is complete, as far as that can be seen: torch.save writes zip archives with checksums."""
    if path.suffix != ".pt":
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # whatever is wrong with it
        return False


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()
