"""The processes that pid 1 starts, and those it inherits: every orphan of the node is pid 1's to reap.

Nobody but the caller may reap what was started here, or its exit status is lost.
"""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

_lock = threading.Lock()
_ours: set[int] = set()


def start(argv: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """As subprocess.Popen. End it with `wait`. Raises OSError."""
    with _lock:
        running = subprocess.Popen(argv, **how)
        _ours.add(running.pid)
    return running


def wait(running: subprocess.Popen[bytes], seconds: float | None = None) -> int:
    """The exit status, as Popen.wait. Raises subprocess.TimeoutExpired."""
    code = running.wait(seconds)
    with _lock:
        _ours.discard(running.pid)
    return code


def run(argv: list[str], *, check: bool = True, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """As subprocess.run. Raises OSError, subprocess.CalledProcessError."""
    running = start(argv, **how)
    out, err = running.communicate()
    code = wait(running)
    if check and code:
        raise subprocess.CalledProcessError(code, argv)
    return subprocess.CompletedProcess(argv, code, out, err)


def reap() -> None:
    """Reap the orphans that have ended."""
    while True:
        with _lock:  # a child that was started a moment ago is in `_ours`, or has not ended
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if (
                ended is None or ended.si_pid in _ours
            ):  # its waiter reaps it at once; the rest follows next time
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
