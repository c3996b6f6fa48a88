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

from agent.files import paths, records
from agent.files.scan import CACHES
from agent.jobs import phases
from agent.node import store
from agent.sync.replaced import folder_name
from cloudddp.agent.protocol.file_steps import MAX_KEPT, REPLACED, Kept
from cloudddp.agent.protocol.manifest import Entry, path_to_wire
from cloudddp.agent.protocol.transfer import FileHead
from cloudddp.agent.protocol.writing import FOLDER, FileWriter, known_of, open_below, open_file


class ProjectWriter(FileWriter):
    """Names were checked where the listing was decoded (manifest.check_files). What is in the way is
    deleted, or kept where a job wrote it."""

    def __init__(self, folder: Path, synced: Mapping[str, Entry] = MappingProxyType({})) -> None:
        """`synced` may be overwritten, as long as they are unchanged: files that a sync has written."""
        super().__init__(folder, store.ROOT / f"begun-{folder.name}")
        self._project, self._synced = folder, synced
        self._aside, self._kept = folder_name(), list[str]()
        self._jobs: Optional[tuple[int, records.Results]] = None

    def make_way(self, parent: int, base: str, path: str, head: Optional[FileHead] = None) -> None:
        self._keep(parent, base, path, head)
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            os.close(os.open(base, FOLDER, dir_fd=parent))
            shutil.rmtree(f"/proc/self/fd/{parent}/{base}")

    def _keep(self, parent: int, base: str, path: str, head: Optional[FileHead]) -> None:
        """Move what is there out of the way if it is a job's, unless it is what `head` describes."""
        try:
            info = os.lstat(base, dir_fd=parent)
        except OSError:
            return
        is_synced = path in self._synced and paths.describe(base, parent) == self._synced[path]
        if is_synced or path.startswith(f"{REPLACED}/"):
            return
        if stat.S_ISDIR(info.st_mode):
            is_kept = self._has_new_files(parent, base, path)
        else:
            is_new = stat.S_ISREG(info.st_mode) and self._is_new(path, info)
            is_kept = is_new and not _is_same(parent, base, info, head)
        if is_kept:
            folder, last = self.place(f"{self._aside}/{path}")
            os.rename(base, last, src_dir_fd=parent, dst_dir_fd=folder)
            self._kept.append(path)
            if self._jobs is not None and (copies := self._jobs[1].moved(path, self._aside)):
                records.keep_copies(self._project, copies)

    @property
    def kept(self) -> Optional[Kept]:
        names = tuple([path_to_wire(name) for name in self._kept[:MAX_KEPT]])
        return Kept(len(self._kept), names) if names else None

    def _is_new(self, name: str, info: os.stat_result) -> bool:
        """Whether a job may have written a file, and nobody has pulled it since."""
        if self._jobs is None:
            self._jobs = phases.first_began(), records.results(self._project)
        began, results = self._jobs
        written = info.st_ctime_ns
        if results.origin(name, info) == records.PUT_BACK:
            return False
        return 0 < began <= written and not results.is_pulled(name, written)

    def _has_new_files(self, parent: int, base: str, name: str) -> bool:
        top = f"/proc/self/fd/{parent}/{base}"
        for folder, folders, names in os.walk(top):
            folders[:] = [one for one in folders if one not in CACHES]
            for one in names:
                path = os.path.join(folder, one)
                with contextlib.suppress(OSError):
                    info = os.lstat(path)
                    if stat.S_ISREG(info.st_mode) and self._is_new(name + path[len(top) :], info):
                        return True
        return False

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


def _is_same(parent: int, base: str, info: os.stat_result, head: Optional[FileHead]) -> bool:
    with contextlib.suppress(OSError):  # it may be readable for another user only
        if head is not None and head.size == info.st_size:
            return known_of(open_file(parent, base)).digest == head.digest.hex()
    return False


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
