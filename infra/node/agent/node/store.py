"""The agent's files below ~/.cloudddp: records that are replaced atomically, and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Optional, TypeVar

from cloudddp.agent.protocol.codec import (
    MAX_REQUEST,
    ProtocolError,
    check_job_id,
    check_project,
    decode,
    encode,
)

T = TypeVar("T")

ROOT = Path.home() / ".cloudddp"
# A file in a job's folder: its blocks are for the records that are written when the disk is full.
RESERVE = "reserve"
STATUS_FILE = "status.json"  # in a job's folder: the training status that rank 0 reports
STEPS_FOLDER = "steps"  # in a job's folder: RANK.json, in which a rank reports its steps
RESERVE_BYTES = 1 << 16
BLOCK = 512  # bytes: the unit of st_blocks
MAX_RECORD = 1 << 20  # bytes of a job's record: one with the longest script takes 800 kB


def write(path: Path, record: Any) -> None:
    """Replace a file by a record."""
    replace(path, encode(record))


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, so that no reader gets a partial file.

    How a job ended must be recorded even on a full disk, also if another program takes each block that
    becomes free: then blocks that are there already are used, of the file itself (not atomically) or of a
    reserve.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_private(temporary, data)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if _overwrite(path, data):
            return
        for folder in list(path.parents)[:2]:
            with contextlib.suppress(OSError):
                os.replace(folder / RESERVE, temporary)
                break
        if not _overwrite(temporary, data):
            raise
    os.replace(temporary, path)


def _overwrite(path: Path, data: bytes) -> bool:
    """Write into the blocks that a file has; return whether there were enough."""
    try:
        with open_regular(path, os.O_RDWR) as file:
            if len(data) > os.fstat(file.fileno()).st_blocks * BLOCK:
                return False
            written = os.pwrite(file.fileno(), data, 0)
            os.ftruncate(file.fileno(), len(data))
            return written == len(data)
    except OSError:
        return False


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def read(path: Path, kind: type[T], limit: int = MAX_RECORD) -> Optional[T]:
    """Return the record in a file of at most `limit` bytes, or None where there is none that fits."""
    try:
        return decode(read_bytes(path, limit), kind)
    except (OSError, ProtocolError):
        return None


def read_bytes(path: Path, limit: int = MAX_REQUEST) -> bytes:
    """Return the contents of a file. Raises OSError, also for more than `limit` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def open_regular(path: Path, access: int = os.O_RDONLY) -> BinaryIO:
    """Open a file for reading, or with O_RDWR and more for writing, too. Raises OSError for anything but a
    regular file.

    A rank may replace any file here: a pipe would block the step, and a device such as /dev/zero has no end.
    """
    descriptor = os.open(path, access | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb" if access == os.O_RDONLY else "r+b")


def project_folder(name: str) -> Path:
    """Return the project's folder in the home folder of the login user."""
    check_project("the folder", name)
    return Path.home() / name


def job_folder(job: str) -> Path:
    check_job_id("job", job)
    return ROOT / "jobs" / job


def step_file(folder: Path, rank: int) -> Path:
    """Return the file in a job's folder in which a rank reports its steps."""
    return folder / STEPS_FOLDER / f"{rank}.json"


def create_root() -> None:
    ROOT.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of this node: two laptops may run steps at the same time."""
    create_root()
    with open(ROOT / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
