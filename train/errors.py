"""What can stop a training run that the person at the keyboard can mend.

Holds the exceptions which end as one sentence instead of a traceback. It must not know torch, so that a wrong
flag is reported before the second that importing torch takes.
"""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot go on. The message names the thing that failed and what to do; exit code 1."""

    exit_code = 1


class UsageError(TrainError):
    """Wrong flags, a missing library, or missing data, found before the first step; exit code 2."""

    exit_code = 2


class Preempted(TrainError):
    """Some rank was told to stop (SIGTERM), and all agreed to at this step; exit code 143, as a shell reports it.

    Not 0: torchrun and schedulers would take the job for done.
    """

    exit_code = 143
