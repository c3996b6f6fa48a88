"""Bringing results home: a tar stream from a node, unpacked beside its place and moved there when it is whole.

A node is not trusted: whatever runs there as the login user decides what comes. So only what was asked for is taken,
by names that mean the same everywhere (safe_names.py), through open folders and never through a link (safe_files.py).
A stream that no agent sends is refused as a whole; a single file that cannot be transferred is left out and reported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp import nodes, safe_names, state, untar
from cloudddp.cluster import PROJECT
from cloudddp.errors import CloudDDPError, NodeError, UsageError
from cloudddp.nodes import Runner
from cloudddp.safe_files import Descent, Folder, resolved
from cloudddp.safe_names import Parts
from cloudddp.text import one_line

MAX_NOTES = 50  # that are shown; the others are counted
_LONGEST_NOTE = 500  # characters
_STDERR = 1 << 16  # bytes of the agent's own notes that are kept
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors that concern one name: the file system ignores case, forbids the name or has it already.
_OF_ONE_FILE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_LATEST = 1 << 33  # seconds since the epoch: the year 2242


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought. `older` files were last written before the job began; `notes` say what was
    missing or left out, and why."""

    files: int
    size: int
    older: int
    notes: tuple[str, ...]


def pull(runner: Runner, names: Sequence[str], *, node: int, to: Path, since: float | None = None) -> Pulled:
    """Copy files and folders of the project on one node into the folder `to`. `since`: when the job began.

    Files arrive in a folder inside it first and are moved when all are there, so that a broken transfer never
    leaves half a snapshot under a good name. Raises UsageError for a name or a target that is not possible; NodeError, with
    nothing moved, where the node sends what was not asked for; CloudDDPError where `to` cannot be written.
    """
    roots = check_names(names)
    check_target(to)
    notes = _Notes()
    with _target(to) as target, _incoming(target) as incoming:
        _receive(runner, roots, node, incoming, notes)
        moved = _Move(notes, since=int(since or 0))
        try:
            moved.everything(incoming, target)
        except OSError as error:
            raise _unwritable(to, error) from None
    return Pulled(moved.files, moved.size, moved.older, notes.lines())


def check_target(to: Path, *, hint: str = "give another folder with --to") -> None:
    """Raise UsageError where results cannot be put into the folder `to`, or must not. Changes nothing."""
    real = resolved(to)
    if any(safe_names.guarded(part) and not part.startswith(".cloudddp") for part in real.parts):
        raise UsageError(
            f"{to} is inside a repository's own folder, so results cannot be put there", hint=hint
        )
    existing = next(path for path in (real, *real.parents) if _exists(path))
    if _is_state(existing):
        raise UsageError(
            f"{to} is inside CLOUDDDP_HOME ({state.home()}), which holds cloudddp's own files", hint=hint
        )
    if not existing.is_dir():
        raise UsageError(f"{existing} is not a folder, so results cannot be put into {to}", hint=hint)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{existing} cannot be written, so results cannot be put into {to}", hint=hint)


def check_names(names: Sequence[str]) -> tuple[Parts, ...]:
    """Return the paths that a user asked for. Raises UsageError for one that leads out of the project."""
    try:
        return safe_names.asked(names)
    except ValueError as error:
        raise UsageError(
            f"{str(error)!r} is not a path inside the project", hint="give a path as it is in the project"
        ) from None


_MORE_ROOM = "free some, pull less (`cloudddp pull PATH`), or give another folder with --to"


def _is_state(folder: Path) -> bool:
    """Return whether a folder is CLOUDDDP_HOME or in it, by whatever name."""
    home = _identity(state.home())
    return home is not None and any(_identity(path) == home for path in (folder, *folder.parents))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _exists(path: Path) -> bool:
    """Return whether a path leads to something that this user can reach."""
    return _identity(path) is not None


# -- the target --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _target(to: Path) -> Iterator[Folder]:
    """Yield the folder `to`, open. Folders that were created for it and stay empty are removed again."""
    missing = [path for path in (to, *to.parents) if not _exists(path)]
    try:
        to.mkdir(parents=True, exist_ok=True)
        target = Folder.at(to)
    except OSError as error:
        raise _unwritable(to, error) from None
    try:
        with target:
            yield target
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


@contextlib.contextmanager
def _incoming(target: Folder) -> Iterator[Folder]:
    """Yield a new folder in the target, and remove it with what is left in it."""
    name = f".cloudddp-incoming-{secrets.token_hex(6)}"
    try:
        os.mkdir(name, 0o700, dir_fd=target.descriptor)
        folder = target.enter(name)
    except OSError as error:
        raise _unwritable(target.path, error) from None
    try:
        with folder:
            yield folder
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=target.descriptor)


def _unwritable(to: Path, error: OSError) -> CloudDDPError:
    if error.errno in _FULL:
        return CloudDDPError(
            f"{to}: no space is left on this computer's disk for the results; nothing was kept",
            hint=_MORE_ROOM,
        )
    where = f" ({error.filename})" if error.filename and str(to) != str(error.filename) else ""
    return CloudDDPError(
        f"results cannot be written to {to}{where}: {error.strerror}", hint="give another folder with --to"
    )


# -- from the node -----------------------------------------------------------------------------------------


def _receive(runner: Runner, roots: Sequence[Parts], node: int, folder: Folder, notes: _Notes) -> None:
    """Have the node send what was asked for into an empty folder."""
    # A name that begins with '-' would be taken for an option.
    names = ["/".join((".", *root)) for root in roots]
    try:
        with _Unpack(folder, roots, notes, node) as unpack:
            reader = untar.Reader(unpack)
            result = nodes.run_step(
                runner, node, "pack", f"--project={PROJECT}", *names,
                timeout=120, on_stdout=reader.feed, on_stderr=notes.feed,
            )  # fmt: skip
            if result.exit_code:
                raise NodeError(f"node {node}: {notes.last() or nodes.last_words(result)}")
            reader.close()
    except untar.Cut as error:
        raise NodeError(
            f"node {node}: the results are incomplete: {one_line(str(error), _LONGEST_NOTE)}",
            hint="nothing was kept; repeat `cloudddp pull`",
        ) from None
    except untar.Refused as error:
        raise NodeError(
            f"node {node} sent results that cloudddp refuses: {one_line(str(error), _LONGEST_NOTE)}; "
            "nothing was kept",
            hint="a program on that node has replaced the agent or writes into its output; "
            f"look with `cloudddp ssh {node}`, or end the cluster with `cloudddp down`",
        ) from None
    except OSError as error:
        raise _unwritable(folder.path.parent, error) from None


class _Unpack:
    """Writes the members of a stream into a folder that is empty at first: an untar.Receiver."""

    def __init__(self, folder: Folder, roots: Sequence[Parts], notes: _Notes, node: int) -> None:
        self._node = node
        self._roots = roots
        self._notes = notes
        self._descent = Descent(folder)
        self._file = -1  # the descriptor of the file that is coming, -1 where it is left out
        self._mtime = 0
        self._own: Parts | None = None  # the folder of git or cloudddp whose files are being left out

    def __enter__(self) -> _Unpack:
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
        """Return a member's path. Raises Refused for what no agent sends."""
        try:
            path = safe_names.split(member.name)
        except ValueError as error:
            raise untar.Refused(f"{member.name!r} {error}") from None
        if not safe_names.covers(self._roots, path):
            raise untar.Refused(f"{member.name!r} was not asked for")
        if member.kind == "link":
            end = safe_names.link_end(path, member.target)
            if end is None or not safe_names.covers(self._roots, end):
                raise untar.Refused(
                    f"{member.name!r} is a link to {member.target!r}, outside of what was asked for"
                )
        return path

    def _left_out(self, member: untar.Member, path: Parts) -> bool:
        """Return whether a member stays out though an agent may send it, after a note."""
        if self._own is not None and path[: len(self._own)] == self._own:
            return True
        own = next((at for at, part in enumerate(path) if safe_names.guarded(part)), None)
        if own is not None:
            self._own = path[: own + 1]
            self._notes.left_out(
                "/".join(self._own), "git or cloudddp would act on it, so `pull` does not write it"
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
        self._check_room(folder, member)
        self._file = folder.create(path[-1], 0o600 | (member.mode & 0o755))
        self._mtime = moment

    def _check_room(self, folder: Folder, member: untar.Member) -> None:
        disk = os.fstatvfs(folder.descriptor)
        free = disk.f_bavail * disk.f_frsize
        if member.size > free:
            name = one_line(member.name, _LONGEST_NOTE)
            raise CloudDDPError(
                f"node {self._node}: {name} is {member.size >> 20} MiB, and {free >> 20} MiB are free on this "
                "computer's disk; nothing was kept",
                hint=_MORE_ROOM,
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


# -- into place --------------------------------------------------------------------------------------------


@dataclass
class _Move:
    """Moves what has come into the target, files over files, and counts it."""

    notes: _Notes
    since: int
    files: int = 0
    size: int = 0
    older: int = 0
    _state: tuple[int, int] | None = field(default_factory=lambda: _identity(state.home()))

    def everything(self, source: Folder, target: Folder) -> None:
        for name in source.names():
            info = os.stat(name, dir_fd=source.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._folder(source, target, name, stat.S_IMODE(info.st_mode))
                continue
            if target.kind(name) == stat.S_IFDIR:
                raise _in_the_way(target.path / name, "is a folder, and a file in the results")
            os.rename(name, name, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
            self.files += 1
            self.size += info.st_size
            self.older += info.st_mtime < self.since

    def _folder(self, source: Folder, target: Folder, name: str, mode: int) -> None:
        try:
            inner = target.enter(name, make=mode)
        except NotADirectoryError:
            raise _in_the_way(
                target.path / name, "is a link or a file, and a folder in the results"
            ) from None
        with inner:
            if inner.identity == self._state:
                self.notes.left_out(str(inner.path), "it is CLOUDDDP_HOME, which holds cloudddp's own files")
                return
            with source.enter(name) as within:
                self.everything(within, inner)


def _in_the_way(path: Path, why: str) -> CloudDDPError:
    return CloudDDPError(
        f"{path} {why}: it was not replaced", hint="remove it, or give another folder with --to"
    )


# -- notes --------------------------------------------------------------------------------------------------


class _Notes:
    """What was missing or left out, from the agent's lines on stderr and from us: the first ones, and a count."""

    def __init__(self) -> None:
        self._ours: list[str] = []
        self._more = 0
        self._theirs = bytearray()
        self._cut = False

    def left_out(self, name: str, why: str) -> None:
        if len(self._ours) < MAX_NOTES:
            self._ours.append(one_line(f"left out {name}: {why}", _LONGEST_NOTE))
        else:
            self._more += 1

    def feed(self, data: bytes) -> None:
        """Take some of what the agent writes on stderr."""
        room = _STDERR - len(self._theirs)
        self._theirs += data[:room]
        self._cut = self._cut or len(data) > room

    def last(self) -> str:
        """Return the last line of the agent's own."""
        lines = self._lines()
        return one_line(lines[-1], _LONGEST_NOTE) if lines else ""

    def _lines(self) -> list[str]:
        return [line for line in self._theirs.decode(errors="replace").split("\n") if line.strip()]

    def lines(self) -> tuple[str, ...]:
        theirs = [
            one_line(line, _LONGEST_NOTE)
            for line in self._lines()
            if line.startswith(("missing ", "left out "))
        ]
        more = self._more + max(len(theirs) - MAX_NOTES, 0)
        if self._cut:
            tail = [f"and more than {more} more" if more else "and more, which are not shown"]
        else:
            tail = [f"and {more} more"] if more else []
        return (*theirs[:MAX_NOTES], *self._ours, *tail)
