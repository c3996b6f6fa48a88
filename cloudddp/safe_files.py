"""Files and folders reached by open descriptors, one component at a time, so that no link leads a write elsewhere.

A path is looked up anew by every call that takes one, and each look-up follows links that somebody may have put
there meanwhile. Here a folder is opened once, without following a link, and what is in it is named relative to that.
This module knows nothing of clusters or nodes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from cloudddp.errors import UsageError

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PRIVATE = 0o700
_ANOTHER = "set CLOUDDDP_HOME to a folder of your own"
_OF_OTHERS = 0o022  # may be written by the group or by everybody


def resolved(path: Path | str) -> Path:
    """Return the path without links, as far as it exists. A loop of links, where Path.resolve raises RuntimeError, is
    left for the call that opens it.
    """
    return Path(os.path.realpath(path))


class Folder:
    """An open folder. `path` is what it was called when it was opened, for messages alone."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Open a folder by its path, through whatever links that has. Raises OSError."""
        return cls(os.open(path, _OPEN_FOLDER), path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def identity(self) -> tuple[int, int]:
        """What tells this folder from every other, however it was reached."""
        info = os.fstat(self.descriptor)
        return info.st_dev, info.st_ino

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Errors in the block carry the path of `name`, which must be one component."""
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"not a name in a folder: {name!r}")
        try:
            yield
        except OSError as error:
            error.filename = str(self.path / name)
            raise

    def enter(self, name: str, *, make: int | None = None) -> Folder:
        """Open a folder in this one; with `make`, make it with that mode where it is missing.

        Raises OSError: NotADirectoryError for a file, and also for a link, wherever that leads.
        """
        with self._naming(name):
            if make is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, make, dir_fd=self.descriptor)
            try:
                descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK):  # a link, on systems that say so
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
                raise
        return Folder(descriptor, self.path / name)

    def names(self) -> list[str]:
        """Return what is in it, in order."""
        with os.scandir(self.descriptor) as entries:
            return sorted(entry.name for entry in entries)

    def kind(self, name: str) -> int:
        """Return the type bits of what has that name (stat.S_IFREG, S_IFLNK, ...), or 0 where nothing has."""
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return 0

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor of a new file, for writing. Raises FileExistsError where anything has that name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._naming(name):
            return os.open(name, flags, mode, dir_fd=self.descriptor)

    def append(self, name: str, mode: int = 0o600, *, empty: bool = False) -> int:
        """Return a descriptor of a file of the user's own, made where it is missing, that writes at its end.

        Raises UsageError where a link, somebody else's file or something else has that name.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self._naming(name):
                descriptor = os.open(name, flags, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
                raise self._not_ours(name) from None
            raise
        info = os.fstat(descriptor)
        # With a second hard link, somebody else could choose the file that is written to.
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            os.close(descriptor)
            raise self._not_ours(name)
        os.fchmod(descriptor, mode)
        if empty:
            os.ftruncate(descriptor, 0)
        return descriptor

    def _not_ours(self, name: str) -> UsageError:
        return UsageError(
            f"{self.path / name} is not a regular file of your own: it was not written to",
            hint="look at it with `ls -l`, and remove it",
        )

    def replace(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put `data` in a file's place, whole and on the disk; a link of that name is replaced, not followed."""
        temporary = f".{name}.{secrets.token_hex(4)}.tmp"
        with self._naming(name):
            descriptor = self.create(temporary, mode)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    os.fchmod(file.fileno(), mode)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self.descriptor)
                raise
            os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; of a link, the link."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def read(self, name: str) -> bytes:
        """Return a file's contents. Raises OSError, also for a link."""
        with self._naming(name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        with os.fdopen(descriptor, "rb") as file:
            return file.read()


def private(root: Path, *names: str, make: bool = True) -> Folder:
    """Return a folder below `root`: it and all from `root` on are the user's alone. With `make`, missing ones are made.

    Modes are tightened to 0700 whatever the umask was. Raises UsageError where one is a link or belongs to
    somebody else, or where others can write to `root` and may have put anything there; OSError.
    """
    if make and not root.exists() and not root.is_symlink():
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(_PRIVATE)
    check(root)
    folder = Folder.at(root)
    try:
        _tighten(folder)
        for name in names:
            try:
                inner = folder.enter(name, make=_PRIVATE if make else None)
            except NotADirectoryError:
                raise _bad(folder.path / name, "is not a folder", "remove it") from None
            folder.close()
            folder = inner
            _tighten(folder)
    except BaseException:
        folder.close()
        raise
    return folder


def check(root: Path) -> None:
    """Raise UsageError where a private folder exists and others could have put things into it. Changes nothing."""
    try:
        link, info = root.lstat(), root.stat()
    except OSError:  # not there yet; or it cannot be reached, which is found out when it is needed
        return
    if not stat.S_ISDIR(info.st_mode):
        raise _bad(root, "is not a folder", _ANOTHER)
    if info.st_uid != os.geteuid() or link.st_uid not in (info.st_uid, 0):
        raise _bad(root, "belongs to another user", _ANOTHER)
    if info.st_mode & _OF_OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        why = f"can be written by other users (mode {mode:04o})"
        raise _bad(root, why, f"if nobody else has put anything there: chmod 700 {root}; or {_ANOTHER}")


def _tighten(folder: Folder) -> None:
    info = os.fstat(folder.descriptor)
    if info.st_uid != os.geteuid():
        raise _bad(folder.path, "belongs to another user", f"remove it, or {_ANOTHER}")
    if stat.S_IMODE(info.st_mode) != _PRIVATE:
        os.fchmod(folder.descriptor, _PRIVATE)


def _bad(path: Path, why: str, hint: str) -> UsageError:
    return UsageError(f"{path} {why}, so cloudddp does not use it", hint=hint)


class Descent:
    """The way from a folder to one below it, kept open: members of a stream come folder by folder."""

    def __init__(self, root: Folder) -> None:
        self._open: list[tuple[str, Folder]] = []
        self._root = root

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        self._up_to(0)

    def to(self, parts: Sequence[str], *, make: int | None = None) -> Folder:
        """Return the folder at `parts`, missing ones made with mode `make`. It is open until the next call."""
        same = 0
        for (name, _), wanted in zip(self._open, parts, strict=False):
            if name != wanted:
                break
            same += 1
        self._up_to(same)
        for name in parts[same:]:
            self._open.append((name, self._here.enter(name, make=make)))
        return self._here

    @property
    def _here(self) -> Folder:
        return self._open[-1][1] if self._open else self._root

    def _up_to(self, count: int) -> None:
        while len(self._open) > count:
            self._open.pop()[1].close()
