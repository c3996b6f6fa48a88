"""The lock of a project's files on this node: who may change them, and whether somebody has.

A sync holds it while it changes files. A launch keeps what it has synced until its job starts: it leaves a
lease in the lock's file, which ends with that start, or with the process that serves the laptop. The file's
time is the version of the project: each sync sets it before its first change, so a launch whose files were
compared or sent at another version is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Optional

from agent.jobs import phases
from agent.node import processes, store
from cloudddp.agent.protocol.codec import MAX_REQUEST, JobId, ProtocolError, decode, encode
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import JobPhase

BUSY = 20.0  # seconds to wait for another sync or launch
BUSY_POLL = 0.02  # seconds between two checks for its end
LEASE = 60.0  # seconds between the end of a launch's sync and its setup or start, at most
CHANGED = "another launch or sync has changed the project's files on this node meanwhile; repeat the command"


@frozen
class _Lease:
    """The launch of `job` owns the files while `session`, the agent's process that serves its laptop, runs.
    `at`: since when, by the monotonic clock."""

    job: JobId
    session: int
    born: str
    at: float

    @property
    def holds(self) -> bool:
        folder = store.job_folder(self.job)
        if phases.was_started(folder) or not processes.runs(self.session, self.born):
            return False
        setup = phases.recorded(folder)
        return setup.state is JobPhase.SETUP if setup else 0 <= time.monotonic() - self.at < LEASE


class ProjectLock:
    """The lock, while it is held."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def version(self) -> int:
        return os.fstat(self._file.fileno()).st_mtime_ns

    def check(self, version: int) -> None:
        """Raise SystemExit where the files have another version. 0 is any."""
        if version not in (0, self.version):
            raise SystemExit(CHANGED)

    def changes(self) -> None:
        """Note that the files are about to be changed. It needs no space on the disk."""
        self._set_version(max(time.time_ns(), self.version + 1))

    def lease(self, job: str) -> None:
        """Let nobody else change the files until the job has started. Called at the end of a sync."""
        version, session = self.version, os.getppid()
        with contextlib.suppress(OSError):  # the disk is full: `start` still checks the version
            self._file.truncate(0)
            os.pwrite(
                self._file.fileno(),
                encode(_Lease(job, session, processes.born(session), time.monotonic())),
                0,
            )
        self._set_version(version)

    def owner(self) -> str:
        """Return the job whose launch owns the files, or ''."""
        with contextlib.suppress(ProtocolError):
            found = decode(os.pread(self._file.fileno(), MAX_REQUEST, 0), _Lease)
            return found.job if found.holds else ""
        return ""

    def _set_version(self, version: int) -> None:
        os.utime(self._file.fileno(), ns=(version, version))


@contextlib.contextmanager
def held(folder: Path, *, within: float = BUSY, unless_leased: Optional[str] = None) -> Iterator[ProjectLock]:
    """Hold the lock of a project. `unless_leased`: wait, too, while the launch of another job than this one
    owns the files.

    Raises SystemExit if that takes too long, OSError. A sync that was interrupted ends soon after its laptop
    is gone.
    """
    deadline = time.monotonic() + within
    store.create_root()
    with _open(folder) as file:
        lock = ProjectLock(file)
        while True:
            why = "another sync writes to this node"
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owner = "" if unless_leased is None else lock.owner()
                if owner in ("", unless_leased):
                    break
                fcntl.flock(file, fcntl.LOCK_UN)
                why = f"the launch of job {owner} owns the project's files on this node"
            if time.monotonic() > deadline:
                raise SystemExit(f"{why}; wait for its end, and repeat")
            time.sleep(BUSY_POLL)
        yield lock


def _open(folder: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would block
    return open(os.open(store.ROOT / f"sync-{folder.name}.lock", flags, 0o600), "r+b", buffering=0)
