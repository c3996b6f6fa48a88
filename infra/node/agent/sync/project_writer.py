"""Changes the files of a project for a sync. What jobs wrote is kept (sync/replaced.py), and a file that
comes in parts stays where it was begun, so that the next sync continues it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
from collections.abc import Container, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Callable, Optional

from agent.files import paths
from agent.node import store
from agent.sync.replaced import Replaced
from agent.sync.writer import FileWriter, Incoming
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import Record


class ProjectWriter(FileWriter):
    """Names were checked where the listing was decoded (manifest.check_folders). What is in the way is
    deleted, or kept where a job wrote it."""

    def __init__(
        self, folder: Path, on_work: Callable[[int], None], synced: Container[str] = frozenset()
    ) -> None:
        """`synced` may be overwritten: files that a sync has written. `on_work` gets the bytes of files that
        were begun earlier, as they are hashed, and 1 for each other change."""
        super().__init__(folder)
        self._on_work = on_work
        self.partials = Partials(folder)
        self.replaced = Replaced(folder, synced, self._place, self._mark)
        os.umask(0o022)

    def continued(self, name: str, entry: Entry) -> Incoming:
        """Return a file that comes in parts, with what there is of it."""
        temporary = _partial_name(name, entry)
        self.partials.add(name, temporary)
        return Incoming(self, self._place(name)[0], temporary, name, self._on_work)

    def small(self, name: str, record: Record, contents: memoryview) -> None:
        super().small(name, record, contents)
        self._on_work(1)

    def _make_way(self, parent: int, base: str, name: str, record: Optional[Record] = None) -> None:
        self.replaced.keep(parent, base, name, record)

    def _rename(self, parent: int, present: str, base: str, source: Optional[int] = None) -> None:
        """A folder of that name is deleted."""
        try:
            super()._rename(parent, present, base, source)
        except IsADirectoryError:
            shutil.rmtree(f"/proc/self/fd/{parent}/{base}")
            super()._rename(parent, present, base, source)

    def link(self, name: str, target: str) -> None:
        parent = self._place(name)[0]
        temporary = self._temporary()
        os.symlink(target, temporary, dir_fd=parent)
        self.give_name(parent, temporary, name)
        self._on_work(1)

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
        self._on_work(1)

    def move(self, old: str, name: str, entry: Entry) -> None:
        """Give a file that has the contents another name, and this mode and time."""
        folder, _, base = old.rpartition("/")
        # Opened anew: a folder that is open may have been replaced.
        source = os.open(paths.inside(self.folder, folder) if folder else self.folder, paths.FOLDER)
        try:
            parent, new = self._place(name)
            self._make_way(parent, new, name)
            self._rename(parent, base, new, source)
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
                self._on_work(1)
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


def _partial_name(name: str, entry: Entry) -> str:
    known = repr((name, entry.size, entry.mtime_ns)).encode("utf-8", "surrogateescape")
    return f".{sha256(known).hexdigest()[:16]}{paths.TEMPORARY}"


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
