"""What this computer has of the files that are pulled: in the target, and from a transfer that broke.

A file is the same as the node's if its size and time are; a time of a whole second does not identify the
contents, because programs set such times (tar, cp), so the contents are compared by hash. A file that is the
beginning of the node's is continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import Any

from cloudddp.files import Descent, Folder
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import Entry, is_unfinished

BLOCK = 1 << 20  # bytes that are read at once
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class Known:
    """A file that is here, below the folder `root`. `hasher` has read all of its `size` bytes, if the node
    has to compare them; otherwise it is the same."""

    root: Folder
    path: Parts
    size: int
    mtime_ns: int
    hasher: Any = None  # hashlib's


class Here:
    """Looks for files in `before`, where what is of a broken transfer is, and then in the `target`."""

    def __init__(self, before: Folder, target: Folder) -> None:
        self._places = ((before, Descent(before), False), (target, Descent(target), True))

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        for _root, descent, _is_public in self._places:
            descent.__exit__()

    def find(self, entry: Entry, path: Parts) -> Known | None:
        """Return the file at that path, as far as it may save sending that of the node; else None. Raises
        OSError."""
        for root, descent, is_public in self._places:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                folder = descent.to(path[:-1])
                info = os.stat(path[-1], dir_fd=folder.descriptor, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    return _usable(root, folder, info, entry, path, is_public=is_public)
        return None


def _usable(
    root: Folder, folder: Folder, info: os.stat_result, entry: Entry, path: Parts, *, is_public: bool
) -> Known | None:
    found = Known(root, path, info.st_size, info.st_mtime_ns)
    if not is_unfinished(info.st_mode) and info.st_mtime_ns % 10**9:
        is_same = (info.st_size, info.st_mtime_ns) == (entry.size, entry.mtime_ns)
        return found if is_same else None
    if info.st_size == entry.size == 0:
        return found
    is_hidden = is_public and any(part.startswith(".") for part in path)
    # Hidden files of this user: not even their hashes go to a node.
    if is_hidden or not 0 < info.st_size <= entry.size:
        return None
    found.hasher, found.size = _hash(folder, path[-1], info.st_mode)
    return found


def _hash(folder: Folder, name: str, mode: int) -> tuple[Any, int]:
    """Return a hasher that has read a file, and how many bytes."""
    hasher, size = hashlib.sha256(), 0
    with contextlib.ExitStack() as closing:
        if is_unfinished(mode):  # its owner has to allow that it is read
            writer = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor)
            closing.callback(os.close, writer)
            os.fchmod(writer, stat.S_IMODE(mode) | stat.S_IRUSR)
            closing.callback(os.fchmod, writer, stat.S_IMODE(mode))
        reader = os.open(name, _READ, dir_fd=folder.descriptor)
        closing.callback(os.close, reader)
        while piece := os.read(reader, BLOCK):
            hasher.update(piece)
            size += len(piece)
    return hasher, size


def copy(known: Known, descriptor: int) -> Any:
    """Append the file's first `size` bytes to an open file; return a hasher that has read them. Raises
    OSError."""
    hasher, left = hashlib.sha256(), known.size
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(Descent(known.root)).to(known.path[:-1])
        reader = os.open(known.path[-1], _READ, dir_fd=folder.descriptor)
        opened.callback(os.close, reader)
        while left and (piece := os.read(reader, min(BLOCK, left))):
            hasher.update(piece)
            left -= len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
    return hasher


def take(known: Known, to: Folder) -> None:
    """Move the file into the folder `to`. Raises OSError."""
    with Descent(known.root) as descent:
        folder = descent.to(known.path[:-1])
        os.rename(known.path[-1], known.path[-1], src_dir_fd=folder.descriptor, dst_dir_fd=to.descriptor)
