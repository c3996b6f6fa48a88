"""Changes the files of a project for a sync. What jobs wrote is kept (sync/replaced.py)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Optional

from agent.files import paths
from agent.node import store
from agent.sync.replaced import Replaced
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import Record
from cloudddp.agent.protocol.writing import FOLDER, FileWriter, open_below


class ProjectWriter(FileWriter):
    """Names were checked where the listing was decoded (manifest.check_files). What is in the way is
    deleted, or kept where a job wrote it."""

    def __init__(self, folder: Path, synced: Mapping[str, Entry] = MappingProxyType({})) -> None:
        """`synced` may be overwritten, as long as they are unchanged: files that a sync has written."""
        super().__init__(folder, store.ROOT / f"begun-{folder.name}")
        self.replaced = Replaced(folder, synced, self.place)

    def make_way(self, parent: int, base: str, path: str, record: Optional[Record] = None) -> None:
        self.replaced.keep(parent, base, path, record)
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            os.close(os.open(base, FOLDER, dir_fd=parent))
            shutil.rmtree(f"/proc/self/fd/{parent}/{base}")

    def touch(self, name: str, mode: int, mtime_ns: int) -> None:
        """Set mode and time of a file that has the contents."""
        parent, base = self.place(name)
        # The name may be a link by now. O_PATH: its owner need not be allowed to read the file.
        descriptor = os.open(base, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SystemExit(
                    f"{name!r} was replaced on this node while it was synced; repeat the command"
                )
            opened = f"/proc/self/fd/{descriptor}"
            os.chmod(opened, mode)
            os.utime(opened, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(descriptor)


def to_disk(folder: Path) -> None:
    """Wait until all that was written is on the disk: one call for any number of files, which an fsync of
    each is not.

    After a crash of the node there may be files of the right size and time that are empty, or full of zeros:
    the manifest, which says that they are complete, has to be written later.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except AttributeError:  # a C library without syncfs
        os.sync()
    finally:
        os.close(descriptor)


def remove(project: Path, files: Mapping[str, Entry]) -> None:
    """Delete files, unless a job has changed them since they were compared, and the folders that are empty
    then. Raises SystemExit for one that cannot be deleted, OSError."""
    folders, root = set(), os.open(project, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name, entry in files.items():
            folder, _, base = name.rpartition("/")
            folders.add(folder)
            try:
                at = open_below(root, folder, FOLDER)
                try:
                    if paths.describe(base, at) == entry:
                        os.unlink(base, dir_fd=at)
                finally:
                    os.close(at)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # it is not there
                    raise SystemExit(f"cannot delete {name!r}: {error.strerror}") from None
    finally:
        os.close(root)
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        path = project / folder
        with contextlib.suppress(OSError):
            while path != project:
                path.rmdir()
                path = path.parent
