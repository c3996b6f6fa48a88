"""Which processes belong to a simulator: everything that it starts carries a mark in its environment.

With the marks, `stop` works after the server was killed, and touches nothing else. This module reads /proc
and sends signals.
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
_TIMEOUT = 30.0  # seconds for killed processes to leave /proc; only uninterruptible I/O takes this long


@dataclass(frozen=True, slots=True)
class Process:
    """A snapshot of one process. A pid can be reused; a pid and a start time cannot."""

    pid: int
    parent: int
    started: int  # clock ticks since boot
    home: str  # value of HOME_MARK, or ''
    node: str  # value of NODE_MARK, or ''


def read(pid: int) -> Process | None:
    """Return the process with this pid, or None if it is gone, a zombie, or another user's."""
    try:
        fields = _stat(pid)
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
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
    """Return the real uid of a process, or None if it is gone."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


class Handle:
    """A pidfd of a process, so that a signal never reaches another process that gets its pid later."""

    def __init__(self, pid: int, *, parent: int) -> None:
        """Raise ProcessLookupError if the process has ended or is not a child of `parent`."""
        self.pid = pid
        self._lock = threading.Lock()
        self._descriptor = os.pidfd_open(pid)
        # Checked after the pidfd is open: before that, the pid could be reused.
        if _parent(pid) != parent:
            self.close()
            raise ProcessLookupError(f"process {pid} is gone")

    def send(self, number: int) -> None:
        """Send a signal. No error if the process is gone or the handle is closed."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name. Raises OSError."""
    text = (_PROC / str(pid) / "stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _all_processes() -> Iterator[Process]:
    for entry in os.listdir(_PROC):  # noqa: PTH208 (names, ten times a second)
        if entry.isdecimal() and (process := read(int(entry))):
            yield process


def belonging(home: Path, node: str | None = None) -> list[Process]:
    """Return the live processes of the simulator at `home`, or of one of its nodes, without the caller.

    Parents come before their children. A process belongs to the simulator if it carries the marks or descends
    from one that does (a program can clear its environment, but not change its parent); it then belongs to
    the node of its parent.
    """
    running = list(_all_processes())
    found = [p for p in running if p.home == str(home) and (node is None or p.node == node)]
    known = {process.pid for process in found}
    parents = known
    while parents:
        nodes = {process.pid: process.node for process in found}
        children = [
            replace(p, node=nodes[p.parent]) for p in running if p.parent in parents and p.pid not in known
        ]
        parents = {process.pid for process in children}
        known = known | parents
        found += children
    return [process for process in found if process.pid != os.getpid()]


def by_node(home: Path) -> dict[str, list[int]]:
    """Return the pids of every node's processes, from one pass over /proc."""
    pids: dict[str, list[int]] = {}
    for process in belonging(home):
        pids.setdefault(process.node, []).append(process.pid)
    return pids


def kill(home: Path, node: str | None = None) -> int:
    """Send SIGKILL to all that `belonging` returns until nothing is left. Return the number of processes
    killed.

    Raises TimeoutError with the pids that remain.
    """
    killed: set[tuple[int, int]] = set()
    deadline = time.monotonic() + _TIMEOUT
    while left := _stop_all(home, node):
        trusted = {process.pid for process in left}
        for process in reversed(left):  # children first: a child without marks is identified by its parent
            if _send(signal.SIGKILL, process, home, trusted):
                killed.add((process.pid, process.started))
        if time.monotonic() > deadline:
            raise TimeoutError(f"cannot kill processes {[process.pid for process in left]}")
        time.sleep(0.005)
    return len(killed)


def stop(home: Path, node: str, *, spare: int = 0) -> None:
    """Send SIGSTOP to every process of a node except `spare`.

    Raises TimeoutError if they fork faster than they can be stopped.
    """
    _stop_all(home, node, spare)


def resume(home: Path, node: str) -> None:
    """Send SIGCONT to every process of a node."""
    found = belonging(home, node)
    for process in found:
        _send(signal.SIGCONT, process, home, {other.pid for other in found})


def _stop_all(home: Path, node: str | None, spare: int = 0) -> list[Process]:
    """Stop and return all that `belonging` finds, so that no parent forks between the end of its child and
    its own."""
    stopped: set[tuple[int, int]] = set()
    deadline = time.monotonic() + _TIMEOUT
    while True:
        found = belonging(home, node)
        new = [p for p in found if (p.pid, p.started) not in stopped and p.pid != spare]
        if not new:
            return found
        for process in new:
            _send(signal.SIGSTOP, process, home, {other.pid for other in found})
            stopped.add((process.pid, process.started))
        if time.monotonic() > deadline:
            raise TimeoutError(f"cannot stop processes {[process.pid for process in new]}")


def _send(number: int, process: Process, home: Path, trusted: set[int]) -> bool:
    """Signal one process after checking again that it is the simulator's: a mistake could end the user's
    session."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # With the pidfd open the pid cannot be reused; it may have been reused before.
        now = read(process.pid)
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
