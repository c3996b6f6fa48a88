"""Errors that a user can fix. They end the run with one sentence instead of a traceback.

Must not import torch: a wrong flag is reported before the second that importing torch takes.
"""

from __future__ import annotations

import time


class TrainError(Exception):
    """Training cannot continue. The message names what failed and what to do; exit code 1."""

    exit_code = 1
    follows = False
    """Whether the cause is on another rank, which reports it."""


class UsageError(TrainError):
    """Bad flags, a missing library or missing data, found before the first step; exit code 2."""

    exit_code = 2


def note_time(error: BaseException) -> None:
    """Remember when an error happened, before other ranks can end because of it: the cleanup until it is
    recorded may take longer than all of theirs."""
    if not hasattr(error, "happened"):
        error.happened = time.time()  # type: ignore[attr-defined]


def time_of(error: BaseException) -> float:
    """Return when an error happened, in seconds since the epoch; now, if nothing has noted it."""
    return float(getattr(error, "happened", None) or time.time())


def following(kind: type[TrainError], what: str) -> TrainError:
    """Return the error of a rank that ends because another one could not do something."""
    error = kind(f"stopped because another rank could not {what}")
    error.follows = True
    return error


class Preempted(TrainError):
    """A rank received SIGTERM and all ranks agreed to stop at this step; exit code 143, as a shell reports
    it.

    Not 0: torchrun and schedulers would take the job for finished.
    """

    exit_code = 143
