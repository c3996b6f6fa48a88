"""The folder beside the results in which a transfer arrives. After a broken transfer it stays, and the next
one continues.

Its name is that of the transfer: the same node and job find it again, another node does not. It belongs to
this user alone, and one pull at a time uses it. In it are `files`, what the node has sent or confirmed in
this transfer, and `before`, what had arrived in those that broke.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.files import Folder
from cloudddp.job.results.unpack import Truncated
from cloudddp.job.results.write_errors import OTHER_FOLDER_HINT, cannot_write

PREFIX = ".cloudddp-incoming-"


@dataclass(frozen=True, slots=True)
class Incoming:
    files: Folder
    before: Folder


def name_of(*words: str) -> str:
    """Return the name of the folder for a transfer, from what distinguishes it."""
    return PREFIX + hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:16]


@contextlib.contextmanager
def incoming(target: Folder, name: str, *, keeps: bool = True) -> Iterator[Incoming]:
    """Yield the folder of a transfer. What is left in it is removed in the end, unless the transfer broke and
    `keeps`."""
    try:
        folder = _locked(target, name)
    except OSError as error:
        raise cannot_write(target.path, error) from None
    keep = False
    with folder:
        try:
            with _opened(folder) as arrived:
                yield arrived
        except (NodeError, Truncated, KeyboardInterrupt):
            keep = keeps and not _is_empty(folder)
            raise
        except OSError as error:
            raise cannot_write(target.path, error) from None
        finally:
            if not keep:
                shutil.rmtree(name, ignore_errors=True, dir_fd=target.descriptor)


def is_kept(target: Folder, name: str) -> bool:
    """Return whether something of a broken transfer is kept."""
    return target.kind(name) != 0


def _locked(target: Folder, name: str) -> Folder:
    """Return the folder, created if it is missing, locked until it is closed. Raises OSError."""
    while True:
        try:
            folder = target.enter(name, make=0o700)
        except NotADirectoryError:
            raise _unusable(target, name, "is not a folder") from None
        try:
            info = os.fstat(folder.descriptor)
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise _unusable(target, name, "can be used by other users")
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(name, dir_fd=target.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            folder.close()  # another pull has completed and removed it meanwhile
            continue
        except OSError as error:
            folder.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CloudDDPError(
                    f"another pull from this node is writing to {target.path}",
                    hint=f"wait until it has ended, or {OTHER_FOLDER_HINT}",
                ) from None
            raise
        except BaseException:
            folder.close()
            raise
        if (here.st_dev, here.st_ino) == folder.identity:
            return folder
        folder.close()


def _unusable(target: Folder, name: str, why: str) -> CloudDDPError:
    return CloudDDPError(
        f"{target.path / name} {why}, so no results are written there",
        hint=f"remove it, or {OTHER_FOLDER_HINT}",
    )


@contextlib.contextmanager
def _opened(folder: Folder) -> Iterator[Incoming]:
    with folder.enter("files", make=0o700) as files, folder.enter("before", make=0o700) as before:
        _absorb(files, before)
        yield Incoming(files, before)


def _absorb(files: Folder, before: Folder) -> None:
    """Move everything from one folder into the other, replacing what has the same path."""
    for name in files.names():
        kind, other = files.kind(name), before.kind(name)
        if kind == other == stat.S_IFDIR:
            with files.enter(name) as inner, before.enter(name) as within:
                _absorb(inner, within)
            os.rmdir(name, dir_fd=files.descriptor)
            continue
        if other == stat.S_IFDIR:
            shutil.rmtree(name, dir_fd=before.descriptor)
        elif other:
            before.remove(name)
        os.rename(name, name, src_dir_fd=files.descriptor, dst_dir_fd=before.descriptor)


def _is_empty(folder: Folder) -> bool:
    """Return whether nothing has arrived; False if that is unknown."""
    with contextlib.suppress(OSError), folder.enter("files") as files, folder.enter("before") as before:
        return not files.names() and not before.names()
    return False
