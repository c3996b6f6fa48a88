"""Folders of the user alone, and files in them that are replaced as a whole or appended to, without following
links.

Anyone who controls the simulator's record and its socket can run commands in it, so its folder must not be
writable by other users. The code is separate from the product's: the simulator does not import the product
that it tests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from cloudddp.errors import UsageError

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_WRITABLE_BY_OTHERS = 0o022
_HINT = "set CLOUDDDP_HOME to a folder of your own"


class PrivateFolder:
    """An open folder. What is in it is addressed relative to its descriptor, so that replacing a component of
    `path` by a link has no effect. `path` is for messages only.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    def close(self) -> None:
        os.close(self.descriptor)

    def append(self, name: str, *, truncate: bool = False) -> int:
        """Return a descriptor that writes at the end of a file of the user, created with mode 0600 if
        missing.

        Raises UsageError if the name is a link, another user's file, a hard link, or not a regular file.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, _FILE_MODE, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
                raise self._not_regular(name) from None
            error.filename = str(self.path / name)
            raise
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            os.close(descriptor)
            raise self._not_regular(name)
        os.fchmod(descriptor, _FILE_MODE)
        if truncate:
            os.ftruncate(descriptor, 0)
        return descriptor

    def replace(self, name: str, data: bytes) -> None:
        """Write a file atomically and durably: readers, and a crash, see the old file or the new one."""
        temporary = f".{name}.{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, _FILE_MODE, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), _FILE_MODE)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise
        os.fsync(self.descriptor)

    def _not_regular(self, name: str) -> UsageError:
        return UsageError(
            f"{self.path / name} is not a regular file of your own: it was not written to",
            hint="look at it with `ls -l`, and remove it",
        )


@contextlib.contextmanager
def private_folder(root: Path, *names: str) -> Iterator[PrivateFolder]:
    """Open a folder below `root`, created with mode 0700 if missing.

    Raises UsageError if `root` or a folder on the way is a link or belongs to another user, or if other users
    can write to `root`; OSError.
    """
    if not root.exists() and not root.is_symlink():
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(_FOLDER_MODE)
    check(root)
    folder = PrivateFolder(os.open(root, _OPEN_FOLDER), root)
    try:
        _restrict(folder)
        for name in names:
            inner = _open_subfolder(folder, name)
            folder.close()
            folder = inner
            _restrict(folder)
        yield folder
    finally:
        folder.close()


def check(root: Path) -> None:
    """Raise UsageError if a folder exists and other users could have written to it. Changes nothing."""
    try:
        link, info = root.lstat(), root.stat()
    except OSError:  # missing; or unreachable, which shows when it is used
        return
    if not stat.S_ISDIR(info.st_mode):
        raise _unusable(root, "is not a folder", _HINT)
    if info.st_uid != os.geteuid() or link.st_uid not in (info.st_uid, 0):
        raise _unusable(root, "belongs to another user", _HINT)
    if info.st_mode & _WRITABLE_BY_OTHERS:
        raise _unusable(
            root,
            f"can be written by other users (mode {stat.S_IMODE(info.st_mode):04o})",
            f"if nobody else has put anything there: chmod 700 {root}; or {_HINT}",
        )


def resolve(path: Path) -> Path:
    """Return the path without links, as far as it exists; unlike Path.resolve, a loop of links raises
    nothing."""
    return Path(os.path.realpath(path))


def _open_subfolder(folder: PrivateFolder, name: str) -> PrivateFolder:
    path = folder.path / name
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, _FOLDER_MODE, dir_fd=folder.descriptor)
    try:
        return PrivateFolder(os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=folder.descriptor), path)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):  # a file, or a link
            raise _unusable(path, "is not a folder", "remove it") from None
        error.filename = str(path)
        raise


def _restrict(folder: PrivateFolder) -> None:
    """Set mode 0700, whatever the umask was."""
    info = os.fstat(folder.descriptor)
    if info.st_uid != os.geteuid():
        raise _unusable(folder.path, "belongs to another user", f"remove it, or {_HINT}")
    if stat.S_IMODE(info.st_mode) != _FOLDER_MODE:
        os.fchmod(folder.descriptor, _FOLDER_MODE)


def _unusable(path: Path, why: str, hint: str) -> UsageError:
    return UsageError(f"{path} {why}, so cloudddp does not use it", hint=hint)
