"""Ends the process of a rank without Python's shutdown.

DistributedDataParallel keeps gloo's threads alive beyond destroy_process_group, and one of them may still
wait for the interpreter's lock. Python's shutdown then aborts a finished rank with SIGABRT (torch 2.15);
where the model is freed, it waits forever for that thread while holding the lock (torch 2.11).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

ATEXIT_SECONDS = 30.0  # for the handlers of loggers, which may send what they have left over a network

_kept: list[object] = []


def keep_until_exit(value: object) -> None:
    """Keep a reference to `value`, so that it is never freed."""
    _kept.append(value)


def exit_process(code: int) -> NoReturn:
    """End the process with `code` after running what was registered with atexit and flushing its output."""
    if threading.current_thread() is threading.main_thread():
        # A rank that hangs here would keep the others waiting.
        timer = threading.Timer(ATEXIT_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
