"""What this computer has of the files that are pulled: in the target, and from a transfer that broke.

The node compares it with its files. A file is the same if its size and time are; a time of a whole second
does not identify the contents, because programs set such times (tar, cp), so the contents are compared by
hash. A file that is the beginning of the node's is continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cloudddp.agent.protocol.files import MAX_HAVE, Have
from cloudddp.job.results import safe_names
from cloudddp.job.results.safe_names import Parts
from cloudddp.job.results.unpack import is_unfinished
from cloudddp.safe_files import Folder

BLOCK = 1 << 20  # bytes that are read at once
MAX_NAMES = 32 << 20  # characters of all paths together: a request has at most 64 MiB


@dataclass(slots=True)
class Known:
    """A file that is here, below the folder `root`. `hasher` has read all of its `size` bytes, if it is
    compared by hash."""

    root: Folder
    path: Parts
    size: int
    mtime_ns: int
    hasher: Any = None  # hashlib's
    used: bool = False

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def wire(self) -> Have:
        return Have(self.name, self.size, self.mtime_ns, self.hasher.hexdigest() if self.hasher else "")


def find(before: Folder, target: Folder, roots: Sequence[Parts]) -> list[Known]:
    """Return the files at or below `roots` in both folders, of one path only that in `before`. Raises
    OSError."""
    found: dict[Parts, Known] = {}
    names = 0
    for root, public in ((before, False), (target, True)):
        for known in _files(root, roots, public=public):
            if known.path not in found:
                names += len(known.name)
                if names > MAX_NAMES or len(found) >= MAX_HAVE:
                    return list(found.values())  # the others are sent again
                found[known.path] = known
    return list(found.values())


def _files(root: Folder, roots: Sequence[Parts], *, public: bool) -> Iterator[Known]:
    for path in roots:
        if any(map(safe_names.guarded, path)):
            continue
        with contextlib.ExitStack() as opened:
            folder = root
            try:
                for part in path[:-1]:
                    folder = opened.enter_context(folder.enter(part))
                if path:
                    yield from _entry(root, folder, path, public=public)
                else:
                    yield from _below(root, folder, (), public=public)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue


def _below(root: Folder, folder: Folder, path: Parts, *, public: bool) -> Iterator[Known]:
    for name in folder.names():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            yield from _entry(root, folder, (*path, name), public=public)


def _entry(root: Folder, folder: Folder, path: Parts, *, public: bool) -> Iterator[Known]:
    if len(path) > safe_names.MAX_DEPTH or safe_names.guarded(path[-1]):
        return
    info = os.stat(path[-1], dir_fd=folder.descriptor, follow_symlinks=False)
    if stat.S_ISDIR(info.st_mode):
        with folder.enter(path[-1]) as inner:
            yield from _below(root, inner, path, public=public)
    elif stat.S_ISREG(info.st_mode):
        found = Known(root, path, info.st_size, info.st_mtime_ns)
        if is_unfinished(info.st_mode) or info.st_mtime_ns % 10**9 == 0:
            if public and any(part.startswith(".") for part in path):
                return  # hidden files of this user: not even their hashes go to a node
            found.hasher, found.size = _hash(folder, path[-1], info.st_mode)
        yield found


def _hash(folder: Folder, name: str, mode: int) -> tuple[Any, int]:
    """Return a hasher that has read a file, and how many bytes."""
    hasher, size = hashlib.sha256(), 0
    with contextlib.ExitStack() as closing:
        if is_unfinished(mode):  # its owner has to allow that it is read
            writer = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor)
            closing.callback(os.close, writer)
            os.fchmod(writer, stat.S_IMODE(mode) | stat.S_IRUSR)
            closing.callback(os.fchmod, writer, stat.S_IMODE(mode))
        reader = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.descriptor
        )
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
        folder = known.root
        for part in known.path[:-1]:
            folder = opened.enter_context(folder.enter(part))
        reader = os.open(
            known.path[-1],
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            dir_fd=folder.descriptor,
        )
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
    with contextlib.ExitStack() as opened:
        folder = known.root
        for part in known.path[:-1]:
            folder = opened.enter_context(folder.enter(part))
        os.rename(known.path[-1], known.path[-1], src_dir_fd=folder.descriptor, dst_dir_fd=to.descriptor)
