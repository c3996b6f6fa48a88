"""Writes files below one folder, as they arrive: through open folders, and never through a link.

Until a file is complete it is in the folder `begun`. A large one has a name there that its path makes, so
that a later transfer continues it: its sender compares what there is.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Optional, Union

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.transfer import DIGEST, FileHead, PartialFile

TEMPORARY = ".cloudddp-tmp"  # ends the name of a file that is copied to another file system
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # flags with which a folder is opened
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # likewise a file
MAX_OPEN = 64  # folders: macOS allows 256 open files
PIECE = 1 << 20  # bytes
_BEGUN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def hash_of(descriptor: int) -> tuple[Any, int]:
    """Return a SHA-256 that has read an open file from its position on, and how many bytes there were."""
    found, size = sha256(), 0
    while data := os.read(descriptor, PIECE):
        found.update(data)
        size += len(data)
    return found, size


def open_below(folder: int, path: str, flags: int) -> int:
    """Open what is at a path below an open folder, not through a link; '' is the folder. Raises OSError."""
    *parents, base = path.split("/")
    at = os.dup(folder)
    try:
        for part in parents:
            inner = os.open(part, FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(base or ".", flags, dir_fd=at)
    finally:
        os.close(at)


def open_file(folder: int, path: str) -> int:
    """Return a descriptor of a regular file, as `open_below`."""
    descriptor = open_below(folder, path, FILE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def known_of(descriptor: int) -> PartialFile:
    """Return the size and the digest of an open file, for WANTS, and close it. Raises OSError."""
    with open(descriptor, "rb", buffering=0):
        found, size = hash_of(descriptor)
    return PartialFile(size, found.hexdigest()[: 2 * DIGEST])


class Incoming:
    """A file that comes in parts: `written` bytes of it are here, which `hasher` has read."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor, self.name = descriptor, name
        self.hasher, self.written = hash_of(descriptor)

    def restart(self) -> None:
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        self.hasher, self.written = sha256(), 0

    def write(self, data: memoryview) -> None:
        while data:
            count = os.write(self.descriptor, data)
            self.hasher.update(data[:count])
            self.written += count
            data = data[count:]

    def is_(self, head: FileHead) -> bool:
        """Whether it is the file that a head describes."""
        return (self.written, self.hasher.digest()[:DIGEST]) == (head.size, head.digest)

    def close(self) -> None:
        os.close(self.descriptor)


class FileWriter:
    """Paths are those of files below `folder`, and were checked. A file in the way is replaced, a folder in
    the way of a file is an error: subclasses say otherwise. Nobody else writes in `begun`. `durable`: a file
    is on the disk before it gets its name. For one thread. All of it may raise OSError."""

    def __init__(self, folder: Union[int, Path], begun: Union[int, Path], *, durable: bool = False) -> None:
        """Both may be descriptors; the path `begun` is created if it is missing."""
        self._durable = durable
        if isinstance(begun, Path):
            begun.mkdir(mode=0o700, exist_ok=True)
        self._begun = os.dup(begun) if isinstance(begun, int) else os.open(begun, FOLDER)
        self._begun_path = begun
        self._root = os.dup(folder) if isinstance(folder, int) else os.open(folder, FOLDER & ~os.O_NOFOLLOW)
        self._folders: OrderedDict[str, int] = OrderedDict()
        self._mark, self._numbers = secrets.token_hex(4), itertools.count()

    def close(self, *, complete: bool = False) -> None:
        """`complete`: no later transfer continues what was begun."""
        for descriptor in (self._root, self._begun, *self._folders.values()):
            os.close(descriptor)
        if complete and isinstance(self._begun_path, Path):
            shutil.rmtree(self._begun_path, ignore_errors=True)

    # -- files -----------------------------------------------------------------------------------------------

    def known(self, path: str) -> Optional[PartialFile]:
        """Return what was begun of a file, in an earlier transfer."""
        try:
            known = known_of(os.open(begun_name(path), FILE, dir_fd=self._begun))
        except FileNotFoundError:
            return None
        return known if known.size else None

    def forget(self, but: Iterable[str]) -> None:
        """Delete what was begun, but for these files."""
        kept = {begun_name(path) for path in but}
        with os.scandir(self._begun) as found:
            names = [one.name for one in found if one.name not in kept]
        for name in names:
            os.unlink(name, dir_fd=self._begun)

    def begin(self, path: str, offset: int, *, in_place: bool = False) -> Incoming:
        """Return a file that comes in parts, which has to be finished or closed: with the first `offset`
        bytes of what was begun of it, or of the file `in_place`; 0: empty."""
        name = begun_name(path)
        is_new = in_place or not offset
        descriptor = os.open(name, _BEGUN | os.O_TRUNC * is_new, 0o600, dir_fd=self._begun)
        incoming = Incoming(descriptor, name)
        try:
            if is_new and offset:
                with os.fdopen(self.present(path), "rb", 0) as file:
                    while piece := file.read(min(PIECE, offset - incoming.written)):
                        incoming.write(memoryview(piece))
            if incoming.written != offset:
                raise ProtocolError(f"a part of {path!r} is missing")
        except BaseException:
            incoming.close()
            raise
        return incoming

    def finish(self, path: str, head: FileHead, incoming: Incoming, mode: int) -> None:
        """Give a file that is complete its permissions, time and name, and close it."""
        self.complete(head, incoming, mode)
        self._place_at(path, incoming.name, head)

    def complete(self, head: FileHead, incoming: Incoming, mode: int) -> None:
        """Likewise, but leave it in `begun`."""
        try:
            os.fchmod(incoming.descriptor, mode)
            os.utime(incoming.descriptor, ns=(head.mtime_ns, head.mtime_ns))
            if self._durable:
                os.fsync(incoming.descriptor)
        finally:
            incoming.close()

    def link(self, path: str, target: str, mtime_ns: Optional[int] = None) -> None:
        name = self._name()
        os.symlink(target, name, dir_fd=self._begun)
        if mtime_ns is not None:
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=self._begun, follow_symlinks=False)
        self._place_at(path, name)

    def present(self, path: str) -> int:
        """Return a descriptor of the regular file in its place."""
        return open_file(self._root, path)

    def _name(self) -> str:
        """Return a name in `begun` that is free."""
        return f"{self._mark}-{next(self._numbers)}"

    def _place_at(self, path: str, name: str, head: Optional[FileHead] = None) -> None:
        """Move what is in `begun` to its place."""
        parent, base = self.place(path)
        self.make_way(parent, base, path, head)
        try:
            os.rename(name, base, src_dir_fd=self._begun, dst_dir_fd=parent)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(name, parent, base)

    def _copy(self, name: str, parent: int, base: str) -> None:
        """Move what is in `begun` to a disk that is mounted in the folder."""
        there = f".{name}{TEMPORARY}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(there, dir_fd=parent)
        if stat.S_ISLNK(os.stat(name, dir_fd=self._begun, follow_symlinks=False).st_mode):
            os.symlink(os.readlink(name, dir_fd=self._begun), there, dir_fd=parent)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            opened = os.open(name, FILE, dir_fd=self._begun), os.open(there, flags, 0o600, dir_fd=parent)
            with os.fdopen(opened[0], "rb") as source, os.fdopen(opened[1], "wb", 0) as target:
                info = os.fstat(source.fileno())
                shutil.copyfileobj(source, target, PIECE)
                os.fchmod(target.fileno(), stat.S_IMODE(info.st_mode))
                os.utime(target.fileno(), ns=(info.st_mtime_ns, info.st_mtime_ns))
                if self._durable:
                    os.fsync(target.fileno())
        os.rename(there, base, src_dir_fd=parent, dst_dir_fd=parent)
        os.unlink(name, dir_fd=self._begun)

    def make_way(self, parent: int, base: str, path: str, head: Optional[FileHead] = None) -> None:
        """Keep what must not be replaced by what `head` describes, or by a link or a folder."""

    # -- folders ---------------------------------------------------------------------------------------------

    def place(self, path: str) -> tuple[int, str]:
        """Return an open folder, and the name in it. A file in the way of a folder is deleted."""
        folder, _, base = path.rpartition("/")
        if not folder:
            return self._root, base
        if folder not in self._folders:
            self._folders[folder] = self._open(folder)
            if len(self._folders) > MAX_OPEN:
                os.close(self._folders.popitem(last=False)[1])
        self._folders.move_to_end(folder)
        return self._folders[folder], base

    def _open(self, folder: str) -> int:
        at, path = os.dup(self._root), ""
        for part in folder.split("/"):
            path = f"{path}/{part}" if path else part
            try:
                inner = self._enter(at, part, path)
            finally:
                os.close(at)
            at = inner
        return at

    def _enter(self, parent: int, base: str, path: str) -> int:
        with contextlib.suppress(OSError):
            return os.open(base, FOLDER, dir_fd=parent)
        self.make_way(parent, base, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(base, dir_fd=parent)  # a file or a link, and it is a folder now
        os.mkdir(base, 0o755, dir_fd=parent)
        return os.open(base, FOLDER, dir_fd=parent)


def begun_name(path: str) -> str:
    """Return the name in `begun` of a file that comes in parts."""
    return f"{sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}-begun"
