"""Ends the process of a rank without Python's shutdown.

DistributedDataParallel keeps gloo's threads alive beyond destroy_process_group, and one of them may still wait for the
interpreter's lock. Python's shutdown then aborts a finished rank with SIGABRT (torch 2.15); where the model is freed,
it waits forever for that thread while holding the lock (torch 2.11).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_kept: list[object] = []


def keep_until_exit(value: object) -> None:
    """Keep a reference to `value`, so that it is never freed."""
    _kept.append(value)


def exit_process(code: int) -> NoReturn:
    """End the process with `code` after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
