"""The phases of a job."""

from __future__ import annotations

from enum import Enum

MAX_NODES = 1 << 10
MAX_RANK = 1 << 16
MAX_RESTARTS = 1 << 16
MAX_TOKEN = 64  # characters that tell one cancel from another
LOG_MB, MIN_LOG_MB, MAX_LOG_MB = 1024, 1, 1 << 20  # MiB of one rank's log
MAX_RUNNING = 20  # jobs that a node reports as running; it runs one at a time


class JobPhase(Enum):
    """Where a job is in its life, on one node."""

    SETUP = "setup"  # its setup commands run
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # its supervisor is gone and did not record the end

    @property
    def ended(self) -> bool:
        return self not in (JobPhase.SETUP, JobPhase.STARTING, JobPhase.RUNNING)
