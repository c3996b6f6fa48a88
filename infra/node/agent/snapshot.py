"""The newest valid snapshot on this node, and writing one that another node holds."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

from agent import files, store
from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.agent.protocol.snapshots import (
    MAX_PATTERNS,
    MAX_SHARED,
    MAX_SHARED_NAMES,
    Snapshot,
    SnapshotSearch,
)

PIECE = 1 << 20  # bytes


def newest(search: SnapshotSearch) -> Snapshot:
    project = store.project_folder(search.project)
    skipped: list[str] = []
    for name, (mtime_ns, size) in _found(search):
        with contextlib.suppress(OSError):
            if is_valid(project / name):
                return Snapshot(name, mtime_ns, size, digest(project / name), tuple(skipped[:MAX_PATTERNS]))
        skipped.append(name)
    return Snapshot(skipped=tuple(skipped[:MAX_PATTERNS]))


def every(search: SnapshotSearch) -> tuple[Snapshot, ...]:
    """Return all files that match, the newest first, as many as one message may name. They are not read."""
    found: list[Snapshot] = []
    length = 0
    for name, (mtime_ns, size) in _found(search)[:MAX_SHARED]:
        length += len(name)
        if length > MAX_SHARED_NAMES:
            break
        found.append(Snapshot(name, mtime_ns, size))
    return tuple(found)


def _found(search: SnapshotSearch) -> list[tuple[str, tuple[int, int]]]:
    """Return name, time and size of the files that match, the newest first."""
    project = store.project_folder(search.project)
    excluded = set(search.exclude)
    found: dict[str, tuple[int, int]] = {}
    for pattern in search.patterns:
        # Before Python 3.13 a pattern that ends with ** finds folders only.
        for path in project.glob(f"{pattern}/*" if pattern.endswith("**") else pattern):
            name = path.relative_to(project).as_posix()
            with contextlib.suppress(OSError, UnicodeEncodeError):
                name.encode()
                info = os.lstat(path)
                usual = stat.S_ISREG(info.st_mode) and not name.endswith(files.TEMPORARY)
                if usual and len(name) <= MAX_PATH and name not in excluded:
                    found[name] = (max(info.st_mtime_ns, 0), info.st_size)
    return sorted(found.items(), key=lambda item: item[1], reverse=True)


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


def write(project: str, wanted: Snapshot, read: Callable[[int], bytes]) -> None:
    """Write the snapshot that `read` returns. The file appears under its name once it is complete and has the digest that was
    announced. Raises OSError, and SystemExit for anything else that is not as announced."""
    path = files.replaceable(store.project_folder(project), wanted.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary(path)
    for stale in path.parent.glob(f".*{files.TEMPORARY}"):  # by an agent that was killed
        with contextlib.suppress(OSError):
            stale.unlink()
    found, left = hashlib.sha256(), wanted.size
    try:
        with open(temporary, "wb") as target:
            while left and (piece := read(min(left, PIECE))):
                found.update(piece)
                target.write(piece)
                left -= len(piece)
            target.flush()
            os.fsync(target.fileno())
        if left:
            raise SystemExit(f"the stream of {wanted.path!r} ended {left} bytes too early")
        if found.hexdigest() != wanted.digest:
            raise SystemExit(f"{wanted.path!r} was damaged on its way")
        os.utime(temporary, ns=(wanted.mtime_ns, wanted.mtime_ns))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
