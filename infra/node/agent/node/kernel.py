"""What a process asks of the kernel about itself and others. It imports little: the wrapper of a rank needs
it before the rank starts."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# Names of the agent's processes, at most 15 characters. infra/node/cloudddp-idle.sh looks for them.
RUNS_A_JOB = "cloudddp-job"  # a job or its setup, and the copy of its results
WRAPS_A_RANK = "cloudddp-rank"  # it ends its rank after the job's grace where the job's agents were killed
SETUP_ALONE = "cloudddp-setup"  # a setup whose client is gone: it keeps no node
RAN_A_JOB = "cloudddp-ended"  # the agent of a job that needs its node no longer
TICKS = os.sysconf("SC_CLK_TCK")  # per second of CPU time
ASK_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Loaded here: in a child that was forked while another thread held the loader's lock, it never would be.
_LIBRARY = ctypes.CDLL(None)


def set_name(name: str) -> None:
    """Name this process and its forks: the node must not power off while one is named RUNS_A_JOB."""
    _LIBRARY.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of orphans, so that those with a cleared environment are found, too."""
    _LIBRARY.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int, parent_pid: int) -> None:
    """Get a signal when the parent, `parent_pid`, ends: the thread of it that started this process."""
    _LIBRARY.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:  # it has ended before
        os.kill(os.getpid(), number)


def death_signal(number: int) -> Callable[[], None]:
    """Return a `preexec_fn` with which a child gets a signal when this process ends."""
    own = os.getpid()
    return lambda: die_with_parent(number, own)


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; [] where the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name may be cut in the middle of a character; only what follows it matters.
            return file.read().rsplit(b")", 1)[1].decode().split()
    except OSError:
        return []


def cpu_ticks(pid: int) -> int:
    """Return the CPU time that a process has used, in TICKS; 0 where it has ended."""
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def born(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, so that a reused pid is not mistaken for it.

    '' if it has ended, also while it is a zombie (a container without an init).
    """
    fields = stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def boot() -> str:
    """Return what tells this start of the machine from any other one: no clock that somebody sets changes it.

    Nodes of the simulator share the kernel, and its boot id; each start of one has its own pid 1.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return f"{boot_id}/{born(1)}"


def booted_at() -> float:
    """Return when the machine started, in seconds since the epoch by the clock as it is set now."""
    ticks = int(born(1) or 0)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / TICKS


def name(pid: int) -> str:
    """Return what names a process, also after its pid was given to another one."""
    return f"{pid}:{born(pid)}"
