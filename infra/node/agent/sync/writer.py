"""Writes the files of a sync into the project's folder, through open folders, and never through a link.

A file gets its name once it is complete. One that comes in parts is kept where it was begun, so that the next
sync continues it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import Container, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Callable, Optional

from agent.files import paths
from agent.node import store
from agent.sync.replaced import Replaced
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import DIGEST, FILE_WORK, Record

MAX_OPEN = 256  # folders
PIECE = 1 << 20  # bytes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ProjectWriter:
    """Writes below one folder. Names were checked where the listing was decoded (manifest.check_folders). Not
    for use by several threads."""

    def __init__(
        self, folder: Path, on_work: Callable[[int], None], synced: Container[str] = frozenset()
    ) -> None:
        """`synced` may be overwritten: files that a sync has written. `on_work` gets the bytes of files that
        were begun earlier, as they are hashed, and FILE_WORK for each that is deleted."""
        self.folder = folder
        self._on_work = on_work
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folders: OrderedDict[str, int] = OrderedDict()
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._partials = Partials(folder)
        self.replaced = Replaced(folder, synced, self._place, self._mark)
        os.umask(0o022)  # each file is created with its mode

    def small(self, name: str, record: Record, contents: memoryview) -> None:
        """Write a whole file."""
        parent, base = self._place(name)
        temporary = self._temporary()
        descriptor = os.open(temporary, _NEW, record.mode, dir_fd=parent)
        try:
            try:
                while contents:
                    contents = contents[os.write(descriptor, contents) :]
                os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
            finally:
                os.close(descriptor)
            self.replaced.keep(parent, base, name, record)
            _name(parent, temporary, base)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise

    def link(self, name: str, target: str) -> None:
        parent, base = self._place(name)
        temporary = self._temporary()
        os.symlink(target, temporary, dir_fd=parent)
        self.replaced.keep(parent, base, name)
        _name(parent, temporary, base)

    def _temporary(self) -> str:
        """Return a new name: ext4 takes four times as long to create a file by a name that was there
        before."""
        return f".{self._mark}-{next(self._numbers)}{paths.TEMPORARY}"

    def touch(self, name: str, entry: Entry) -> None:
        """Set mode and time of a file that has the contents."""
        parent, base = self._place(name)
        # The name may be a link by now. O_PATH: its owner need not be allowed to read the file.
        descriptor = os.open(base, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SystemExit(
                    f"{name!r} was replaced on this node while it was synced; repeat the command"
                )
            opened = f"/proc/self/fd/{descriptor}"
            os.chmod(opened, entry.mode)
            os.utime(opened, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(descriptor)

    def move(self, old: str, name: str, entry: Entry) -> None:
        """Give a file that has the contents another name, and this mode and time."""
        folder, _, base = old.rpartition("/")
        # Opened anew: a folder that is open may have been replaced.
        source = os.open(paths.inside(self.folder, folder) if folder else self.folder, paths.FOLDER)
        try:
            parent, new = self._place(name)
            self.replaced.keep(parent, new, name)
            _name(parent, base, new, source)
        except FileNotFoundError:
            raise SystemExit(
                f"{old!r} disappeared on this node while it was renamed; repeat the command"
            ) from None
        finally:
            os.close(source)
        self.touch(name, entry)

    def to_disk(self) -> None:
        """Wait until all that was written is on the disk: one call for any number of files, which an fsync of
        each is not.

        After a crash of the node there may be files of the right size and time that are empty, or full of
        zeros: the manifest, which says that they are complete, has to be written later.
        """
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(self._root):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except AttributeError:  # a C library without syncfs
            os.sync()

    def remove(self, names: Iterable[str]) -> None:
        """Delete files, and the folders that are empty then: what a job wrote stays."""
        by_folder: dict[str, list[str]] = {}
        for name in names:
            folder, _, base = name.rpartition("/")
            by_folder.setdefault(folder, []).append(base)
        for folder, bases in by_folder.items():
            self._remove_in(folder, bases)
        for folder in sorted(filter(None, by_folder), key=len, reverse=True):
            self._remove_empty(folder)

    def _remove_in(self, folder: str, bases: list[str]) -> None:
        path = paths.replaceable(self.folder, f"{folder}/x" if folder else "x").parent
        try:
            at = os.open(path, paths.FOLDER)
        except OSError:
            return  # it is gone
        try:
            for base in bases:
                with contextlib.suppress(OSError):
                    os.unlink(base, dir_fd=at)
                self._on_work(FILE_WORK)
        finally:
            os.close(at)

    def _remove_empty(self, folder: str) -> None:
        path = self.folder / folder
        while path != self.folder:
            try:
                path.rmdir()
            except OSError:
                return
            path = path.parent

    def partial(self, name: str, entry: Entry) -> Partial:
        """Return what there is of a file that comes in parts."""
        parent, base = self._place(name)
        return Partial(
            parent, base, _partial_name(name, entry), name, self._partials, self._on_work, self.replaced
        )

    def forget_partials(self, wanted: set[str]) -> None:
        """Delete what earlier syncs have begun, but for these files."""
        self._partials.forget(wanted)

    def _place(self, name: str) -> tuple[int, str]:
        """Return an open folder and the name in it. What is in the way of a folder is deleted, or kept where
        a job wrote it."""
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
        self.replaced.keep(parent, base, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(base, dir_fd=parent)  # a file or a link, and it is a folder now
        os.mkdir(base, 0o755, dir_fd=parent)
        return os.open(base, paths.FOLDER, dir_fd=parent)


def _name(parent: int, present: str, base: str, source: Optional[int] = None) -> None:
    """Give a file its name. A folder of that name is deleted. `source` is the folder where it is, if that is
    another one."""
    here = parent if source is None else source
    try:
        os.rename(present, base, src_dir_fd=here, dst_dir_fd=parent)
    except IsADirectoryError:
        shutil.rmtree(f"/proc/self/fd/{parent}/{base}")
        os.rename(present, base, src_dir_fd=here, dst_dir_fd=parent)


def _partial_name(name: str, entry: Entry) -> str:
    known = repr((name, entry.size, entry.mtime_ns)).encode("utf-8", "surrogateescape")
    return f".{sha256(known).hexdigest()[:16]}{paths.TEMPORARY}"


class Partial:
    """A file of which a beginning may be there."""

    def __init__(
        self,
        parent: int,
        base: str,
        temporary: str,
        name: str,
        partials: Partials,
        on_work: Callable[[int], None],
        replaced: Replaced,
    ) -> None:
        self._on_work, self._replaced = on_work, replaced
        self._parent, self._base, self._temporary = os.dup(parent), base, temporary
        self._name, self._partials = name, partials
        self._descriptor: Optional[int] = None
        self._hash = sha256()
        self.written = 0

    def begin(self) -> int:
        """Open it, and return another descriptor of it. `written` bytes are there."""
        self._partials.add(self._name, self._temporary)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o644, dir_fd=self._parent)
        while data := os.read(self._descriptor, PIECE):
            self._hash.update(data)
            self.written += len(data)
            self._on_work(len(data))
        return os.dup(self._descriptor)

    def restart(self) -> int:
        """Begin a new file, and return another descriptor of it. Who reads the old one still can."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._parent)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._hash, self.written = sha256(), 0
        return self.begin()

    def write(self, offset: int, data: bytes) -> None:
        assert self._descriptor is not None  # noqa: S101  begin() was called
        if offset != self.written:
            raise ProtocolError("a part of a file is missing")
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, self.written)
            self._hash.update(view[:count])
            self.written += count
            view = view[count:]

    def finish(self, record: Record) -> bool:
        """Give the file its name if it is what was sent; else delete it and return False."""
        assert self._descriptor is not None  # noqa: S101  begin() was called
        good = self.written == record.size and self._hash.digest()[:DIGEST] == record.digest
        if good:
            os.fchmod(self._descriptor, record.mode)
            os.utime(self._descriptor, ns=(record.mtime_ns, record.mtime_ns))
            self._replaced.keep(self._parent, self._base, self._name, record)
            _name(self._parent, self._temporary, self._base)
        else:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._parent)
        return good

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        os.close(self._parent)


class Partials:
    """The record of the files that were begun: path -> the name that they have meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = store.ROOT / f"partial-{folder.name}.json"
        self._names = store.read_mapping(self._file, str)

    def size(self, name: str, entry: Entry) -> int:
        """Return how many bytes of a file there are."""
        temporary = _partial_name(name, entry)
        if self._names.get(name) != temporary:
            return 0
        try:
            return os.lstat(paths.inside(self._folder, name).with_name(temporary)).st_size
        except OSError:
            return 0

    def add(self, name: str, temporary: str) -> None:
        if self._names.get(name) != temporary:
            self._remove(name)
            self._names[name] = temporary
            store.write(self._file, self._names)

    def forget(self, wanted: set[str]) -> None:
        gone = [name for name in self._names if name not in wanted]
        for name in gone:
            self._remove(name)
        if gone:
            store.write(self._file, self._names)

    def _remove(self, name: str) -> None:
        temporary = self._names.pop(name, "")
        if temporary.endswith(paths.TEMPORARY) and "/" not in temporary:
            with contextlib.suppress(OSError, SystemExit):
                path = paths.inside(self._folder, name)
                path.with_name(temporary).unlink()
