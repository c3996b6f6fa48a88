"""Whose processes are whose: everything the simulator starts carries a mark in its environment.

The marks are what makes `stop` possible after the server was killed, and what keeps it from touching anything
else. This module reads /proc and sends signals; it knows nothing of EC2 or SSH.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


def owner(pid: int) -> int | None:
    """The user whose process it is, or None if it is gone."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


class Handle:
    """One child of a process of ours, held so that a signal never reaches who gets its pid later."""

    def __init__(self, pid: int, *, parent: int) -> None:
        """Raises ProcessLookupError where that process is not, or is no child of `parent`."""
        self.pid = pid
        self._lock = threading.Lock()
        self._descriptor = os.pidfd_open(pid)
        # Only now, with the pid held, does it say something about this very process.
        if _parent(pid) != parent:
            self.close()
            raise ProcessLookupError(f"process {pid} is gone")

    def kill(self) -> None:
        """SIGKILL; one that is gone, or closed, is no error."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it, once."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def _parent(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _everything() -> Iterator[Process]:
    for entry in os.listdir(_PROC):  # noqa: PTH208 (names, ten times a second)
        if entry.isdecimal() and (process := look(int(entry))):
            yield process


def belonging(home: Path, node: str | None = None) -> list[Process]:
    """Every live process of the simulator at `home`, or only those of one node of it; never the caller. Parents
    come before their children.

    A process counts if it carries the marks, or if it descends from one that does: a program may clear its
    environment, but not its parent. It is then its parent's node's.
    """
    seen = list(_everything())
    ours = [p for p in seen if p.home == str(home) and (node is None or p.node == node)]
    known = {process.pid for process in ours}
    fresh = known
    while fresh:
        nodes = {process.pid: process.node for process in ours}
        children = [
            replace(p, node=nodes[p.parent]) for p in seen if p.parent in fresh and p.pid not in known
        ]
        fresh = {process.pid for process in children}
        known = known | fresh
        ours += children
    return [process for process in ours if process.pid != os.getpid()]


def by_node(home: Path) -> dict[str, list[int]]:
    """The pids of every node's marked processes, from one look at the machine."""
    pids: dict[str, list[int]] = {}
    for process in belonging(home):
        pids.setdefault(process.node, []).append(process.pid)
    return pids


def end(home: Path, node: str | None = None) -> int:
    """SIGKILL what `belonging` finds until nothing is left; returns how many processes were ended.

    Raises TimeoutError naming the pids if some do not go away.
    """
    ended: set[tuple[int, int]] = set()
    patience = time.monotonic() + _LINGER
    while left := _frozen(home, node):
        trusted = {process.pid for process in left}
        for process in reversed(left):  # children first, while their parents still vouch for them
            if _send(signal.SIGKILL, process, home, trusted):
                ended.add((process.pid, process.started))
        if time.monotonic() > patience:
            raise TimeoutError(f"processes that do not die: {[process.pid for process in left]}")
        time.sleep(0.005)
    return len(ended)


def stop(home: Path, node: str, *, spare: int = 0) -> None:
    """SIGSTOP every process of a node but `spare`; none of them can start another one meanwhile.

    Raises TimeoutError where they start new ones faster than they can be stopped.
    """
    _frozen(home, node, spare)


def resume(home: Path, node: str) -> None:
    """SIGCONT every process of a node."""
    left = belonging(home, node)
    for process in left:
        _send(signal.SIGCONT, process, home, {other.pid for other in left})


def _frozen(home: Path, node: str | None, spare: int = 0) -> list[Process]:
    """What `belonging` finds, stopped: a parent must not fork anew between its child's end and its own."""
    stopped: set[tuple[int, int]] = set()
    patience = time.monotonic() + _LINGER
    while True:
        left = belonging(home, node)
        fresh = [p for p in left if (p.pid, p.started) not in stopped and p.pid != spare]
        if not fresh:
            return left
        for process in fresh:
            _send(signal.SIGSTOP, process, home, {other.pid for other in left})
            stopped.add((process.pid, process.started))
        if time.monotonic() > patience:
            raise TimeoutError(f"processes that do not stand still: {[process.pid for process in fresh]}")


def _send(number: int, process: Process, home: Path, trusted: set[int]) -> bool:
    """Signal one process, after proving once more that it is ours: a mistake here would end the user's session."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The handle pins whoever has the pid now; only if that is still the process we judged is it ours.
        now = look(process.pid)
        if now is None or now.started != process.started:
            return False
        if now.home != str(home) and now.parent not in trusted:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
