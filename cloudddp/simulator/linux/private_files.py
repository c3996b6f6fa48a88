"""Folders of the user alone, and files in them that are replaced as a whole or appended to.

Anyone who controls the simulator's record and its socket can run commands in it, so its folder must not be
writable by other users; then nobody else can replace what is in it. The code is separate from the product's:
the simulator does not import the product that it tests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from cloudddp.errors import UsageError

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_WRITABLE_BY_OTHERS = 0o022
_HINT = "set CLOUDDDP_HOME to a folder of your own"


def private_folder(root: Path, *names: str) -> Path:
    """Return a folder below `root`, created if missing. It and those on the way get mode 0700.

    Raises UsageError if `root` or a folder on the way is a link or belongs to another user, or if other users
    can write to `root`; OSError.
    """
    if not root.exists() and not root.is_symlink():
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(_FOLDER_MODE)
    check(root)
    root.chmod(_FOLDER_MODE)
    path = root
    for name in names:
        path = path / name
        with contextlib.suppress(FileExistsError):
            path.mkdir(_FOLDER_MODE)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode):  # a file, or a link
            raise _unusable(path, "is not a folder", "remove it")
        if info.st_uid != os.geteuid():
            raise _unusable(path, "belongs to another user", f"remove it, or {_HINT}")
        path.chmod(_FOLDER_MODE)  # whatever the umask was
    return path


def append(path: Path, *, truncate: bool = False) -> int:
    """Return a descriptor that writes at the end of a file of the user, created with mode 0600 if missing.

    Raises UsageError if it is a link, another user's file, a hard link, or not a regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, _FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path) from None
        raise
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
        os.close(descriptor)
        raise _not_regular(path)
    os.fchmod(descriptor, _FILE_MODE)
    if truncate:
        os.ftruncate(descriptor, 0)
    return descriptor


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


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


def _not_regular(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not a regular file of your own: it was not written to",
        hint="look at it with `ls -l`, and remove it",
    )


def _unusable(path: Path, why: str, hint: str) -> UsageError:
    return UsageError(f"{path} {why}, so cloudddp does not use it", hint=hint)
