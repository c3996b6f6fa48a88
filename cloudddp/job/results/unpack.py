"""Writes results into an empty folder, through open folders and never through a link, and notes for the user
what was not written, and why.

What no agent sends is refused: a name that was not requested, or that leads out of the folder. What an agent
may send but this computer cannot hold, or should not get, is left out with a note.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cloudddp.agent.protocol.codec import MAX_REASON
from cloudddp.agent.protocol.manifest import LINK, link_end
from cloudddp.agent.protocol.results import MAX_LEFT, LeftFile
from cloudddp.errors import CloudDDPError, Message
from cloudddp.files import Descent, Folder
from cloudddp.job.results import safe_names
from cloudddp.job.results.safe_names import Parts
from cloudddp.text import one_line

MAX_NOTES = 50  # that are shown; the others are counted
LONGEST_NOTE = 500  # characters of a note
_STDERR = 1 << 16  # bytes of the agent's notes that are kept
MISSING_NOTE = "missing "
CHANGED_NOTE = "changed while it was copied: "


class Notes:
    """Collects our own notes and the agent's, which are lines on stderr."""

    def __init__(self) -> None:
        self._ours: list[str] = []
        self._more = 0
        self._stderr = bytearray()
        self._cut = False
        self._left: dict[str, str] = {}
        self._left_more = False

    def left_out(self, name: str, why: str, *, counts: bool = True) -> None:
        """Note that a file was not copied. `counts`: a result may be missing because of it. No name: nor were
        more files."""
        self._add(f"left out {name or why}" + (f": {why}" if name else ""))
        if counts and name and len(self._left) < MAX_LEFT:
            self._left.setdefault(name, one_line(why, MAX_REASON))
        elif counts and name not in self._left:
            self._left_more = True

    @property
    def left(self) -> tuple[LeftFile, ...] | None:
        """Results that were not copied; None where there are more than a node remembers."""
        return None if self._left_more else tuple(LeftFile(*one) for one in self._left.items())

    def changed(self, name: str) -> None:
        """Note that a file may be a mix of two versions."""
        self._add(f"{CHANGED_NOTE}{name}; pull it again when nothing writes to it")

    def _add(self, note: str) -> None:
        if len(self._ours) < MAX_NOTES:
            self._ours.append(one_line(note, LONGEST_NOTE))
        else:
            self._more += 1

    def feed(self, data: bytes) -> None:
        """Take a piece of the agent's stderr."""
        free = _STDERR - len(self._stderr)
        self._stderr += data[:free]
        self._cut = self._cut or len(data) > free

    def last(self) -> str:
        """Return the last line of the agent's stderr, such as an error message."""
        lines = self._stderr_lines()
        return one_line(lines[-1], LONGEST_NOTE) if lines else ""

    def lines(self) -> tuple[str, ...]:
        """Return the notes, and a line that counts those not shown."""
        agents = [
            one_line(line, LONGEST_NOTE) for line in self._stderr_lines() if line.startswith(MISSING_NOTE)
        ]
        more = self._more + max(len(agents) - MAX_NOTES, 0)
        if self._cut:
            rest = [f"and more than {more} more" if more else "and more, which are not shown"]
        else:
            rest = [f"and {more} more"] if more else []
        return (*agents[:MAX_NOTES], *self._ours, *rest)

    def _stderr_lines(self) -> list[str]:
        return [line for line in self._stderr.decode(errors="replace").split("\n") if line.strip()]


FREE_SPACE_HINT: str = Message(
    "free some, pull less (`cloudddp pull PATH`), or choose another folder with --to"
)
OTHER_FOLDER_HINT = "choose another folder with --to"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cannot_write(to: Path, error: OSError) -> CloudDDPError:
    """Return the error for results that could not be written to the folder `to`."""
    if error.errno in _FULL:
        return CloudDDPError(
            f"{to}: no space left on this computer's disk for the results; nothing was kept",
            hint=FREE_SPACE_HINT,
        )
    where = f" ({error.filename})" if error.filename and str(to) != str(error.filename) else ""
    return CloudDDPError(f"cannot write results to {to}{where}: {error.strerror}", hint=OTHER_FOLDER_HINT)


LARGE = 1 << 20  # bytes; a smaller file is not continued after a broken transfer
# Errors that concern one name: the file system ignores case, forbids the name or has it already.
_OF_ONE_FILE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_LATEST = 1 << 33  # seconds since the epoch: the year 2242


FOLDER = "d"  # as the kind of an entry, besides FILE and LINK


class Refused(ValueError):
    """The agent would not send this. The message says why."""


class Truncated(Refused):
    """The stream is truncated."""


class Entry(NamedTuple):
    """What is to be written. Bytes of a name that are not UTF-8 are lone surrogates, as in os.fsdecode."""

    name: str
    kind: str  # FILE, FOLDER or LINK
    size: int = 0  # bytes; 0 except for files
    mode: int = 0o644
    mtime_ns: int = 0  # since the epoch; may be negative
    target: str = ""  # of a link


def is_unfinished(mode: int) -> bool:
    """Return whether a file is marked as unfinished: a complete one can be read by its owner."""
    return stat.S_ISREG(mode) and not mode & stat.S_IRUSR


def local_time(mtime_ns: int) -> int:
    """Return a time of a node as it is set here (ns)."""
    return min(max(mtime_ns, 0), _LATEST * 10**9)


class Unpack:
    """Writes entries in order into a folder that is empty at first: `begin`, `data` and `end`, or
    `discard`."""

    def __init__(self, folder: Folder, roots: Sequence[Parts], notes: Notes, node: int) -> None:
        self._node = node
        self._roots = roots
        self._notes = notes
        self._descent = Descent(folder)
        self._path: Parts = ()
        self._file = -1  # the descriptor of the file that is received, -1 where it is left out
        self._mode: int | None = None  # the mode that a file marked as unfinished gets at its end
        self._guarded: Parts | None = None  # a folder of git or cloudddp whose files are left out

    def __enter__(self) -> Unpack:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._descent.__exit__()

    @property
    def writes(self) -> bool:
        return self._file >= 0

    def begin(self, entry: Entry) -> None:
        path = self.checked(entry)
        if not path or self.leaves_out(entry, path):
            return
        try:
            self._make(entry, path)
        except OSError as error:
            if error.errno not in _OF_ONE_FILE:
                raise
            taken = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
            why = "another entry of these results has the same path" if taken else error.strerror
            self._notes.left_out(entry.name, why or "")

    def checked(self, entry: Entry) -> Parts:
        """Return an entry's path. Raises Refused for one that no agent sends."""
        try:
            path = safe_names.split(entry.name)
        except ValueError as error:
            raise Refused(f"{entry.name!r} {error}") from None
        if not safe_names.covers(self._roots, path):
            raise Refused(f"{entry.name!r} was not requested")
        if entry.kind == LINK:
            end = link_end(path, entry.target)
            if end is None or not safe_names.covers(self._roots, end):
                raise Refused(f"{entry.name!r} is a link to {entry.target!r}, which was not requested")
        return path

    def leaves_out(self, entry: Entry, path: Parts) -> bool:
        """Return whether an entry is left out, and note why."""
        if self._guarded is not None and path[: len(self._guarded)] == self._guarded:
            return True
        guarded = next((at for at, part in enumerate(path) if safe_names.guarded(part)), None)
        if guarded is not None:
            self._guarded = path[: guarded + 1]
            self._notes.left_out(
                "/".join(self._guarded),
                "git or cloudddp would act on it, so `pull` never writes it",
                counts=path[guarded] != ".git",  # which is no result
            )
            return True
        if safe_names.too_long(path):
            self._notes.left_out(entry.name, "its path is too long")
            return True
        return False

    def _make(self, entry: Entry, path: Parts) -> None:
        folder = self._descent.to(path[:-1], make=0o755)
        if entry.kind == FOLDER:
            folder.enter(path[-1], make=0o700 | (entry.mode & 0o755)).close()
            return
        moment = local_time(entry.mtime_ns)
        if entry.kind == LINK:
            os.symlink(entry.target, path[-1], dir_fd=folder.descriptor)
            os.utime(path[-1], ns=(moment, moment), dir_fd=folder.descriptor, follow_symlinks=False)
            return
        self.check_space(folder, entry.name, entry.size)
        descriptor = folder.create(path[-1], 0o600 | (entry.mode & 0o755))
        self.go_on(entry, path, descriptor)

    def parent(self, path: Parts) -> Folder:
        """Return the folder in which that path is. It stays open until the next call, or entry."""
        return self._descent.to(path[:-1], make=0o755)

    def go_on(self, entry: Entry, path: Parts, descriptor: int) -> None:
        """Write what follows to an open file. If it is large, it is marked as unfinished until its end."""
        self._path, self._file = path, descriptor
        if entry.size >= LARGE:
            self._mode = stat.S_IMODE(os.fstat(descriptor).st_mode) | stat.S_IRUSR
            os.fchmod(descriptor, self._mode & ~stat.S_IRUSR)

    def check_space(self, folder: Folder, name: str, size: int) -> None:
        """Raise CloudDDPError where a large file does not fit."""
        if size < LARGE:
            return  # the write fails
        disk = os.fstatvfs(folder.descriptor)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            raise CloudDDPError(
                f"node {self._node}: {one_line(name, LONGEST_NOTE)} is {size >> 20} MiB, and {free >> 20} "
                "MiB are free on this computer's disk; nothing was kept",
                hint=FREE_SPACE_HINT,
            )

    def data(self, piece: memoryview) -> None:
        while self._file >= 0 and piece:
            piece = piece[os.write(self._file, piece) :]

    def end(self, mtime_ns: int, *, exact: bool = True) -> None:
        """Complete the file. Not `exact`: its time is set to a whole second, which says that it does not
        identify the contents (local_files.py)."""
        if self._file >= 0:
            if self._mode is not None:
                os.fchmod(self._file, self._mode)
            moment = local_time(mtime_ns) if exact else local_time(mtime_ns) // 10**9 * 10**9
            os.utime(self._file, ns=(moment, moment))
        self._close()

    def discard(self) -> None:
        if self._file >= 0:
            os.unlink(self._path[-1], dir_fd=self.parent(self._path).descriptor)
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._mode = -1, None
