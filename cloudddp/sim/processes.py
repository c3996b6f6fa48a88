"""Whose processes are whose: everything the simulator starts carries a mark in its environment.

The marks are what makes `stop` possible after the server was killed, and what keeps it from touching anything
else. This module reads /proc and sends SIGKILL; it knows nothing of EC2 or SSH.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME_MARK = "CLOUDDDP_SIM_HOME"
NODE_MARK = "CLOUDDDP_SIM_NODE"

_PROC = Path("/proc")
_LINGER = 30.0  # seconds a killed process may stay in /proc; only uninterruptible I/O takes this long


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was seen: a pid alone may be reused, a pid with its start time is not."""

    pid: int
    parent: int
    started: int  # clock ticks since boot
    home: str  # value of HOME_MARK, or ""
    node: str  # value of NODE_MARK, or ""


def look(pid: int) -> Process | None:
    """The process with this pid, or None if it is gone, a zombie, or another user's."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    marks = dict(item.partition(b"=")[::2] for item in environ.split(b"\0"))
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        home=os.fsdecode(marks.get(HOME_MARK.encode(), b"")),
        node=os.fsdecode(marks.get(NODE_MARK.encode(), b"")),
    )


def _everything() -> Iterator[Process]:
    for entry in os.listdir(_PROC):  # noqa: PTH208 (names, ten times a second)
        if entry.isdecimal() and (process := look(int(entry))):
            yield process


def belonging(home: Path, node: str | None = None) -> list[Process]:
    """Every live process of the simulator at `home`, or only those of one node of it; never the caller.

    A process counts if it carries the marks, or if it descends from one that does: a program may clear its
    environment, but not its parent.
    """
    seen = {process.pid: process for process in _everything()}
    ours = {
        process.pid
        for process in seen.values()
        if process.home == str(home) and (node is None or process.node == node)
    }
    fresh = set(ours)
    while fresh:
        fresh = {p.pid for p in seen.values() if p.parent in fresh and p.pid not in ours}
        ours |= fresh
    return [seen[pid] for pid in sorted(ours - {os.getpid()})]


def end(home: Path, node: str | None = None) -> int:
    """SIGKILL what `belonging` finds until nothing is left; returns how many processes were ended.

    Raises TimeoutError naming the pids if some do not go away.
    """
    ended: set[tuple[int, int]] = set()
    patience = time.monotonic() + _LINGER
    while left := belonging(home, node):
        for process in left:
            if _kill(process):
                ended.add((process.pid, process.started))
        if time.monotonic() > patience:
            raise TimeoutError(f"processes that do not die: {[process.pid for process in left]}")
        time.sleep(0.005)
    return len(ended)


def _kill(process: Process) -> bool:
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The handle pins whoever has the pid now; only if that is still the process we judged is it ours.
        now = look(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
