"""What a process asks of the kernel about its parent and its descendants. It imports little: the wrapper of a rank needs it
before the rank starts."""

from __future__ import annotations

import os

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of orphans, so that those with a cleared environment are found, too."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int, parent_pid: int) -> None:
    """Get a signal when the parent, `parent_pid`, ends: more exactly, the thread that started this process."""
    _prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent_pid:  # it has ended before
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    import ctypes  # 2 ms, which most steps need not take

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
