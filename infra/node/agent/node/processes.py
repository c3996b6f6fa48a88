"""The processes of a job on this node: find them all, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Optional

from agent.node import docker, store
from agent.node.commands import run_quietly
from agent.node.kernel import born as born
from agent.node.kernel import stat
from cloudddp.agent.protocol import TASK_VARIABLE
from cloudddp.agent.protocol.codec import is_job_id
from cloudddp.agent.protocol.frozen import frozen

GIVE_UP_SECONDS = 10.0  # of SIGKILL without effect
PAUSE = 0.05  # seconds between two polls
NO_PID = -1  # no process has this pid
LONGEST_MARK = 80  # bytes


@frozen
class Leader:
    """The process that adopts a task's orphans: the supervisor, or the setup. Part of its record."""

    pid: int
    born: str


@frozen
class Task:
    """A job on this node, or its setup. `mark` is in the environment of its processes; `record` is the file
    that names its Leader. `own`: all descendants of this process belong to it, too. A rank can damage the
    record, and after the death of the supervisor its guard adopts the orphans."""

    mark: str
    record: Path
    own: bool = False


def find(task: Task) -> list[int]:
    """Return the processes of a task, but for its leader: all that carry its mark, or descend from one that
    does.

    Process groups and parents are not enough: torchrun's ranks have sessions of their own, and when torchrun
    and the supervisor are killed they continue as children of pid 1. A process that has cleared its
    environment is found by descent, from a marked process or from the leader.
    """
    parents = _parents()
    mark = f"{TASK_VARIABLE}={task.mark}".encode()
    marked = {pid for pid in parents if mark in _environment(pid)}
    leader = _leader(task)
    roots = marked | {leader} | ({os.getpid()} if task.own else set())
    found = {pid for tree in trees(roots, parents).values() for pid in tree}
    return sorted(found - {leader, os.getpid()})


def tree(pid: int) -> list[int]:
    """Return a process that runs, and its descendants, each after its parent."""
    return trees([pid])[pid]


def trees(pids: Iterable[int], known: Optional[Mapping[int, int]] = None) -> dict[int, list[int]]:
    """Return what `tree` does for each process, with one look at /proc, unless all parents are `known`."""
    parents = _parents() if known is None else known
    children: dict[int, list[int]] = {}
    for one, its_parent in parents.items():
        children.setdefault(its_parent, []).append(one)
    found = {pid: [pid] if pid in parents else [] for pid in pids}
    for tree_of_one in found.values():
        for one in tree_of_one:
            tree_of_one += sorted(children.get(one, ()))
    return found


def _leader(task: Task) -> int:
    """Return the pid of a task's leader, NO_PID if it has ended or the record names none.

    The descendants of pid 0 and 1 are all processes of the machine: a damaged record must not end those.
    """
    record = store.read(task.record, Leader)
    if record is None or record.pid <= 1 or not runs(record.pid, record.born):
        return NO_PID
    return record.pid


def marked_jobs() -> set[tuple[str, int]]:
    """Return the jobs, and their numbers for this node, of which a process has the mark."""
    begin = f"{TASK_VARIABLE}=".encode()
    marks = {one[len(begin) :] for pid in _parents() for one in _environment(pid) if one.startswith(begin)}
    parts = [mark.decode(errors="replace").partition("/") for mark in marks if len(mark) < LONGEST_MARK]
    return {
        (job, int(node)) for job, _, node in parts if is_job_id(job) and node.isascii() and node.isdigit()
    }


def _parents() -> dict[int, int]:
    """Return pid -> parent of all processes that run."""
    parents = {}
    for entry in os.listdir("/proc"):
        fields = stat(int(entry)) if entry.isdigit() else []
        if len(fields) > 1 and fields[0] not in ("Z", "X"):
            parents[int(entry)] = int(fields[1])
    return parents


def _environment(pid: int) -> list[bytes]:
    """Return the variables with which a process was started; [] where it may not be asked, or has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        return environ.read().split(b"\0")
    return []


def runs(pid: Optional[int], born_at: str) -> bool:
    """Return whether the process runs that was recorded as this pid and `born`; '' names none."""
    return pid is not None and bool(born_at) and born(pid) == born_at


def name(pid: int) -> str:
    """Return the name of a process; '' where it has ended."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    return ""


def is_stopped(pid: Optional[int]) -> bool:
    """Return whether a process was stopped, by SIGSTOP or a debugger."""
    return pid is not None and stat(pid)[:1] in (["T"], ["t"])


def parent(pid: int) -> Optional[int]:
    fields = stat(pid)
    return int(fields[1]) if len(fields) > 1 else None


def end(
    task: Task,
    grace: float,
    children: Sequence[subprocess.Popen[bytes]] = (),
    *,
    ask: bool = True,
    latest: Callable[[], float] = lambda: float("inf"),
    first: Callable[[], Sequence[int]] = lambda: (),
) -> tuple[int, int]:
    """SIGTERM, wait up to `grace` seconds, SIGKILL until none is left. Return how many were ended, and how
    many are left. `children` are this process's own, which it must collect. `ask` is False where another
    process sends SIGTERM. `latest` returns when the grace ends, if that has become earlier, by the monotonic
    clock. `first` returns processes that are asked before all others."""
    ended: set[int] = set()
    asked: set[int] = set()
    planned = time.monotonic() + grace
    while True:
        deadline = min(planned, latest())
        pids = find(task)
        if not pids or time.monotonic() > deadline + GIVE_UP_SECONDS:
            if docker.remove_noted(task.record.parent):  # also one that was about to start
                continue
            return len(ended), len(pids)
        ended.update(pids)
        if time.monotonic() > deadline:
            _send(pids, signal.SIGKILL)
        elif ask:
            # Only to the topmost: torchrun forwards it to its ranks, a rank wrapper to its rank.
            chosen = [*first()] or [pid for pid in pids if parent(pid) not in pids]
            fresh = [pid for pid in chosen if pid in pids and pid not in asked]
            _send(fresh, signal.SIGTERM)
            asked.update(fresh)
        for child in children:
            child.poll()
        time.sleep(PAUSE)


def _send(pids: list[int], number: signal.Signals) -> None:
    denied = [str(pid) for pid in pids if _denied(pid, number)]
    if denied:  # where sudo asks for a password they count as left
        run_quietly(["sudo", "-n", "kill", f"-{int(number)}", *denied])


def _denied(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process is another user's: setup commands often use sudo."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return True
    except OSError:
        pass  # it has ended
    return False
