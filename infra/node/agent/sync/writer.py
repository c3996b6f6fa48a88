"""Writes files below one folder, as they arrive: through open folders, and never through a link. A file gets
its name once it is complete."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import Callable, Optional

from agent.files import paths
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.transfer import DIGEST, Record

MAX_OPEN = 256  # folders
PIECE = 1 << 20  # bytes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BEGUN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FileWriter:
    """Names are those of files below `folder`, and were checked. A file in the way is replaced, a folder in
    the way of a file is an error. `durable`: a file is on the disk before it gets its name. Not for use by
    several threads."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self.folder, self.durable = folder, durable
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folders: OrderedDict[str, int] = OrderedDict()
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count()

    def close(self) -> None:
        for descriptor in (self._root, *self._folders.values()):
            os.close(descriptor)

    def small(self, name: str, record: Record, contents: memoryview) -> None:
        """Write a whole file."""
        parent, _ = self._place(name)
        temporary = self._temporary()
        descriptor = os.open(temporary, _NEW, 0o666, dir_fd=parent)
        try:
            try:
                while contents:
                    contents = contents[os.write(descriptor, contents) :]
                self.set_attributes(descriptor, record, record.mode)
            finally:
                os.close(descriptor)
            self.give_name(parent, temporary, name, record)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise

    def begin(self, name: str) -> Incoming:
        """Return a new file that comes in parts."""
        parent, _ = self._place(name)
        return Incoming(self, parent, self._temporary(), name)

    def set_attributes(self, descriptor: int, record: Record, mode: int) -> None:
        """Set permissions (0: those of any new file) and time of a file that is complete."""
        if mode:
            os.fchmod(descriptor, mode)
        os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
        if self.durable:
            os.fsync(descriptor)

    def give_name(self, parent: int, temporary: str, name: str, record: Optional[Record] = None) -> None:
        """Give what has a temporary name in an open folder its name."""
        base = name.rpartition("/")[2]
        self._make_way(parent, base, name, record)
        self._rename(parent, temporary, base)

    def _rename(self, parent: int, present: str, base: str, source: Optional[int] = None) -> None:
        """`source` is the folder where it is, if that is another one."""
        here = parent if source is None else source
        os.rename(present, base, src_dir_fd=here, dst_dir_fd=parent)

    def _make_way(self, _parent: int, _base: str, _name: str, _record: Optional[Record] = None) -> None:
        """Keep what must not be replaced by what `record` describes."""

    def _temporary(self) -> str:
        """Return a new name: ext4 takes four times as long to create a file by a name that was there
        before."""
        return f".{self._mark}-{next(self._numbers)}{paths.TEMPORARY}"

    def _place(self, name: str) -> tuple[int, str]:
        """Return an open folder and the name in it. A file in the way of a folder is deleted."""
        folder, _, base = name.rpartition("/")
        if not folder:
            return self._root, base
        found = self._folders.get(folder)
        if found is None:
            found = self._open(folder)
            self._folders[folder] = found
            if len(self._folders) > MAX_OPEN:
                os.close(self._folders.popitem(last=False)[1])
        return found, base

    def _open(self, folder: str) -> int:
        at = os.dup(self._root)
        path = ""
        for part in folder.split("/"):
            path = f"{path}/{part}" if path else part
            try:
                inner = self._enter(at, part, path)
            finally:
                os.close(at)
            at = inner
        return at

    def _enter(self, parent: int, base: str, name: str) -> int:
        with contextlib.suppress(OSError):
            return os.open(base, paths.FOLDER, dir_fd=parent)
        self._make_way(parent, base, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(base, dir_fd=parent)  # a file or a link, and it is a folder now
        os.mkdir(base, dir_fd=parent)
        return os.open(base, paths.FOLDER, dir_fd=parent)


class Incoming:
    """A file that comes in parts, continued where there is a beginning: `written` bytes. `on_work` gets the
    bytes of that, as they are hashed."""

    def __init__(
        self,
        writer: FileWriter,
        parent: int,
        temporary: str,
        name: str,
        on_work: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self._writer, self._temporary, self._name = writer, temporary, name
        self._parent = os.dup(parent)
        self._descriptor: Optional[int] = os.open(temporary, _BEGUN, 0o666, dir_fd=parent)
        self._hash = sha256()
        self.written = 0
        while data := os.read(self._descriptor, PIECE):
            self._hash.update(data)
            self.written += len(data)
            on_work(len(data))

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def is_ahead_of(self, offset: int) -> bool:
        """Whether there is more than so many bytes, or nothing more will come."""
        return self.written > offset or not self.is_open

    def duplicate(self) -> Optional[int]:
        """Return another descriptor of it while it is open: with that, it can be read also after `close`."""
        return None if self._descriptor is None else os.dup(self._descriptor)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        assert self._descriptor is not None  # noqa: S101  it is open
        if offset != self.written:
            raise ProtocolError("a part of a file is missing")
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, self.written)
            self._hash.update(view[:count])
            self.written += count
            view = view[count:]

    def finish(self, record: Record, mode: int) -> bool:
        """Give the file its name if it is what was sent; else delete it and return False."""
        assert self._descriptor is not None  # noqa: S101  it is open
        good = self.written == record.size and self._hash.digest()[:DIGEST] == record.digest
        if good:
            self._writer.set_attributes(self._descriptor, record, mode)
            self._writer.give_name(self._parent, self._temporary, self._name, record)
        else:
            self.discard()
        return good

    def discard(self) -> None:
        """Delete it, unless it has its name."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._parent)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            os.close(self._parent)
            self._descriptor = None
