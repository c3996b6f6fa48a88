"""The agent's files below ~/.cloudddp: records that are replaced atomically, and locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, TypeVar

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
RESERVE = "reserve"  # a file in a job's folder: its blocks are for the records that are written when the disk is full
STATUS_FILE = "status.json"  # in a job's folder: the training status that rank 0 reports
RESERVE_BYTES = 1 << 16


def write(path: Path, record: Any) -> None:
    """Replace a file atomically, so that no reader gets a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = encode(record)
    try:
        write_private(temporary, data)
    except OSError:
        for folder in list(path.parents)[:2]:  # how a job ended must be recorded even on a full disk
            with contextlib.suppress(FileNotFoundError):
                (folder / RESERVE).unlink()
        write_private(temporary, data)
    os.replace(temporary, path)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def read(path: Path, kind: type[T]) -> Optional[T]:
    """Return the record in a file, or None where there is none that fits."""
    try:
        return decode(path.read_bytes(), kind, limit=MAX_REQUEST)
    except (OSError, ProtocolError):
        return None


def project_folder(name: str) -> Path:
    """Return the project's folder in the home folder of the login user."""
    check_project(name)
    return Path.home() / name


def job_folder(job: str) -> Path:
    check_job_id("job", job)
    return ROOT / "jobs" / job


def create_root() -> None:
    ROOT.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of this node: two laptops may run steps at the same time."""
    create_root()
    with open(ROOT / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
