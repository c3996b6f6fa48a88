"""Child processes of pid 1: those that it starts, and the orphans of the node, which it has to reap.

A child that was started here is reaped by `wait` only, or its exit status would be lost.
"""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

_lock = threading.Lock()
_started: set[int] = set()


def start(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """As subprocess.Popen; reap the process with `wait`. Raises OSError."""
    with _lock:
        process = subprocess.Popen(argv, **options)
        _started.add(process.pid)
    return process


def wait(process: subprocess.Popen[bytes], seconds: float | None = None) -> int:
    """Return the exit status, as Popen.wait. Raises subprocess.TimeoutExpired."""
    code = process.wait(seconds)
    with _lock:
        _started.discard(process.pid)
    return code


def run(argv: list[str], *, check: bool = True, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run. Raises OSError, subprocess.CalledProcessError."""
    process = start(argv, **options)
    out, err = process.communicate()
    code = wait(process)
    if check and code:
        raise subprocess.CalledProcessError(code, argv)
    return subprocess.CompletedProcess(argv, code, out, err)


def reap() -> None:
    """Reap the orphans that have ended."""
    while True:
        with _lock:  # so that a child that has just been started is in `_started`
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in _started:  # `wait` reaps it; the others follow next time
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
