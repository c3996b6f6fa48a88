"""Errors that a user can fix. They end the run with one sentence instead of a traceback.

Must not import torch: a wrong flag is reported before the second that importing torch takes.
"""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot continue. The message names what failed and what to do; exit code 1."""

    exit_code = 1


class UsageError(TrainError):
    """Bad flags, a missing library or missing data, found before the first step; exit code 2."""

    exit_code = 2


class Preempted(TrainError):
    """A rank received SIGTERM and all ranks agreed to stop at this step; exit code 143, as a shell reports it.

    Not 0: torchrun and schedulers would take the job for finished.
    """

    exit_code = 143
