"""The folder beside the results in which a transfer arrives, and from which complete results are moved to
their place. After a broken transfer it stays, and the next one of that node and job finds it by its name. It
belongs to this user alone, for one pull at a time. Files have names there that their paths make."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.files import Folder
from cloudddp.job.results.notes import OTHER_FOLDER_HINT, cannot_write

PREFIX = ".cloudddp-incoming-"


def name_of(*words: str) -> str:
    """Return the name of the folder for a transfer, from what distinguishes it."""
    return PREFIX + hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:16]


@contextlib.contextmanager
def incoming(target: Folder, name: str, *, keeps: bool = True) -> Iterator[Folder]:
    """Yield the folder of a transfer, with the permissions that the umask leaves. What is left in it is
    removed in the end, unless the transfer broke and `keeps`."""
    keep = False
    try:
        with _locked(target, name) as folder:
            try:
                if not keeps:  # of one that was killed
                    shutil.rmtree("files", ignore_errors=True, dir_fd=folder.descriptor)
                with folder.enter("files", make=0o777) as files:
                    try:
                        yield files
                    except (NodeError, KeyboardInterrupt):
                        keep = keeps and bool(files.names())
                        raise
            finally:
                if not keep:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=target.descriptor)
    except OSError as error:
        raise cannot_write(target.path, error) from None


@contextlib.contextmanager
def _locked(target: Folder, name: str) -> Iterator[Folder]:
    """Yield the folder, created if it is missing, locked. Raises OSError."""
    while True:
        try:
            folder = target.enter(name, make=0o700)
        except NotADirectoryError:
            raise _unusable(target, name, "is not a folder") from None
        with folder:
            info = os.fstat(folder.descriptor)
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise _unusable(target, name, "can be used by other users")
            try:
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                text = f"another pull from this node is writing to {target.path}"
                hint = f"wait until it has ended, or {OTHER_FOLDER_HINT}"
                raise CloudDDPError(text, hint=hint) from None
            try:
                here = os.stat(name, dir_fd=target.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue  # another pull has completed and removed it meanwhile
            if os.path.samestat(here, info):
                yield folder
                return


def _unusable(target: Folder, name: str, why: str) -> CloudDDPError:
    return CloudDDPError(
        f"{target.path / name} {why}, so no results are written there",
        hint=f"remove it, or {OTHER_FOLDER_HINT}",
    )


@contextlib.contextmanager
def target_folder(to: Path) -> Iterator[Folder]:
    """Yield the folder `to`, open. Folders that were created for it and stay empty are removed again."""
    missing = [path for path in (to, *to.parents) if identity_of(path) is None]
    try:
        to.mkdir(parents=True, exist_ok=True)
        target = Folder.at(to)
    except OSError as error:
        raise cannot_write(to, error) from None
    try:
        with target:
            yield target
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file or folder; None if it cannot be reached."""
    with contextlib.suppress(OSError):
        info = path.stat()
        return info.st_dev, info.st_ino
    return None
