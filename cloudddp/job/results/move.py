"""Moves complete results into their folder, replacing files."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder, state_home
from cloudddp.job.results.pull_notes import Notes


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file or folder; None if it cannot be reached."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


@dataclass
class Move:
    """Moves the contents of a folder into another one and counts the files. `since`: when the job began."""

    notes: Notes
    since: int
    files: int = 0
    size: int = 0
    older: int = 0
    unchanged: int = 0  # links that the target has already
    _state: tuple[int, int] | None = field(default_factory=lambda: identity(state_home()))

    def contents(self, source: Folder, target: Folder) -> None:
        """Move everything in `source`. Raises OSError, and CloudDDPError where a folder and a file
        conflict."""
        for name in source.names():
            info = os.stat(name, dir_fd=source.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._folder(source, target, name, stat.S_IMODE(info.st_mode))
                continue
            if stat.S_ISLNK(info.st_mode) and _same_link(source, target, name):
                self.unchanged += 1
                continue
            try:
                os.rename(name, name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
            except IsADirectoryError:
                raise _conflict(target.path / name, "is a folder here and a file in the results") from None
            self.files += 1
            self.size += info.st_size
            self.older += info.st_mtime < self.since

    def _folder(self, source: Folder, target: Folder, name: str, mode: int) -> None:
        try:
            inner = target.enter(name, make=mode)
        except NotADirectoryError:
            raise _conflict(
                target.path / name, "is a link or a file here and a folder in the results"
            ) from None
        with inner:
            if inner.identity == self._state:
                self.notes.left_out(
                    "", f"{inner.path}: it is CLOUDDDP_HOME, which holds cloudddp's own files"
                )
                return
            with source.enter(name) as within:
                self.contents(within, inner)


def _same_link(source: Folder, target: Folder, name: str) -> bool:
    if target.kind(name) != stat.S_IFLNK:
        return False
    return os.readlink(name, dir_fd=source.descriptor) == os.readlink(name, dir_fd=target.descriptor)


def _conflict(path: Path, why: str) -> CloudDDPError:
    return CloudDDPError(
        f"{path} {why}: it was not replaced", hint="remove it, or choose another folder with --to"
    )
