"""Writes a stream of results into an empty folder, through open folders and never through a link.

What no agent sends is refused: a name that was not requested, or that leads out of the folder. What an agent may
send but this computer cannot hold, or should not get, is left out with a note.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from cloudddp.errors import CloudDDPError
from cloudddp.job.results import safe_names, untar
from cloudddp.job.results.errors import FREE_SPACE_HINT
from cloudddp.job.results.notes import LONGEST, Notes
from cloudddp.job.results.safe_names import Parts
from cloudddp.safe_files import Descent, Folder
from cloudddp.text import one_line

# Errors that concern one name: the file system ignores case, forbids the name or has it already.
_OF_ONE_FILE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_LATEST = 1 << 33  # seconds since the epoch: the year 2242


class Unpack:
    """An untar.Receiver that writes the members of a stream into a folder that is empty at first."""

    def __init__(self, folder: Folder, roots: Sequence[Parts], notes: Notes, node: int) -> None:
        self._node = node
        self._roots = roots
        self._notes = notes
        self._descent = Descent(folder)
        self._file = -1  # the descriptor of the file that is received, -1 where it is left out
        self._mtime = 0
        self._guarded: Parts | None = None  # a folder of git or cloudddp whose files are left out

    def __enter__(self) -> Unpack:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._descent.__exit__()

    def begin(self, member: untar.Member) -> None:
        path = self._checked(member)
        if not path or self._left_out(member, path):
            return
        try:
            self._make(member, path)
        except OSError as error:
            if error.errno not in _OF_ONE_FILE:
                raise
            taken = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
            why = "another entry of these results has the same path" if taken else error.strerror
            self._notes.left_out(member.name, why or "")

    def _checked(self, member: untar.Member) -> Parts:
        """Return a member's path. Raises Refused for one that no agent sends."""
        try:
            path = safe_names.split(member.name)
        except ValueError as error:
            raise untar.Refused(f"{member.name!r} {error}") from None
        if not safe_names.covers(self._roots, path):
            raise untar.Refused(f"{member.name!r} was not requested")
        if member.kind == "link":
            end = safe_names.link_end(path, member.target)
            if end is None or not safe_names.covers(self._roots, end):
                raise untar.Refused(
                    f"{member.name!r} is a link to {member.target!r}, which was not requested"
                )
        return path

    def _left_out(self, member: untar.Member, path: Parts) -> bool:
        """Return whether a member is left out, and note why."""
        if self._guarded is not None and path[: len(self._guarded)] == self._guarded:
            return True
        guarded = next((at for at, part in enumerate(path) if safe_names.guarded(part)), None)
        if guarded is not None:
            self._guarded = path[: guarded + 1]
            self._notes.left_out(
                "/".join(self._guarded), "git or cloudddp would act on it, so `pull` never writes it"
            )
            return True
        if safe_names.too_long(path):
            self._notes.left_out(member.name, "its path is too long")
            return True
        return False

    def _make(self, member: untar.Member, path: Parts) -> None:
        if member.kind == "folder":
            inside = self._descent.to(path[:-1], make=0o755)
            inside.enter(path[-1], make=0o700 | (member.mode & 0o755)).close()
            return
        folder = self._descent.to(path[:-1], make=0o755)
        moment = min(max(member.mtime, 0), _LATEST)
        if member.kind == "link":
            os.symlink(member.target, path[-1], dir_fd=folder.descriptor)
            os.utime(path[-1], (moment, moment), dir_fd=folder.descriptor, follow_symlinks=False)
            return
        self._check_space(folder, member)
        self._file = folder.create(path[-1], 0o600 | (member.mode & 0o755))
        self._mtime = moment

    def _check_space(self, folder: Folder, member: untar.Member) -> None:
        disk = os.fstatvfs(folder.descriptor)
        free = disk.f_bavail * disk.f_frsize
        if member.size > free:
            name = one_line(member.name, LONGEST)
            raise CloudDDPError(
                f"node {self._node}: {name} is {member.size >> 20} MiB, and {free >> 20} MiB are free on this "
                "computer's disk; nothing was kept",
                hint=FREE_SPACE_HINT,
            )

    def data(self, piece: memoryview) -> None:
        while self._file >= 0 and piece:
            piece = piece[os.write(self._file, piece) :]

    def end(self) -> None:
        if self._file >= 0:
            os.utime(self._file, (self._mtime, self._mtime))
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
