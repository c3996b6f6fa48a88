"""What the agents write into the folder of a job: the state, the verdict, the marks of a stop, notes in the
logs, and what they have noticed of its ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from agent.jobs import phases
from agent.node import kernel, processes, shared_memory, store
from cloudddp.agent.protocol import NOTE
from cloudddp.agent.protocol.codec import MAX_TEXT, encode
from cloudddp.agent.protocol.gang import Unreachable, Wrote
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause, Failure, StateFile, Verdict
from cloudddp.agent.protocol.phases import MAX_NODES, JobPhase
from cloudddp.agent.protocol.progress import MAX_STRAGGLERS, Straggler, Stragglers, ToleratedStall
from cloudddp.agent.protocol.results import MASKED_FILE, Masked
from cloudddp.agent.protocol.sentences import masked
from cloudddp.agent.protocol.start import StartRequest

STRAGGLERS_FILE = "stragglers.json"
STALL_FILE = "stall.json"
FEW = 10  # messages, from which the difference of two clocks is estimated


class JobRecord:
    """The record of a job that runs on this node. Created by its supervisor, whose parent is the guard."""

    def __init__(self, request: StartRequest) -> None:
        self.folder, self._request = store.job_folder(request.job), request
        self._state = StateFile(
            request.job,
            request.node,
            JobPhase.STARTING,
            pid=os.getpid(),
            born=processes.born(os.getpid()),
            script=request.work.script,
            expected=request.work.ranks,
            max_restarts=request.work.max_restarts,
            resumed_from=request.resumed_from,
            guard=os.getppid(),
            guard_born=processes.born(os.getppid()),
            boot=kernel.boot(),
        )

    def running(self, restarts: int) -> None:
        if restarts:
            (self.folder / f"{phases.BEGAN}-{restarts}").touch()
        started = self._state.started or time.time()
        self._state = replace(self._state, state=JobPhase.RUNNING, started=started, restarts=restarts)
        self.write()

    def cannot_start(self, error: str) -> None:
        """Keep why the ranks could not be started; it is written with the end."""
        self._state = replace(self._state, error=error[:MAX_TEXT])

    def refuse(self, error: str) -> None:
        """Record that the job cannot be started on this node."""
        self.cannot_start(error)
        first = Failure(self._request.node, Cause.START, detail=error)
        verdict = Verdict(JobPhase.FAILED, 1, self._request.node, first)
        self.end(verdict, Unreachable({}, (), error))

    def end(self, verdict: Verdict, missing: Optional[Unreachable] = None) -> None:
        """`missing`: why no rank was started, for the reply of `start`."""
        if missing is not None:
            store.write(self.folder / phases.UNREACHABLE_FILE, missing)
        end_own(self._request, self._state, verdict)

    def write(self) -> None:
        self._state = replace(self._state, reached=dict(shared_memory.reached))
        store.write(self.folder / phases.STATE_FILE, self._state)

    # -- a stop ----------------------------------------------------------------------------------------------

    def mark_stop(self, *, cancelled: bool, token: str) -> None:
        """Mark that the supervisor ends the ranks. The time of a cancel that is marked already is kept."""
        with contextlib.suppress(OSError):
            (self.folder / phases.STOPPED_MARK).touch()
            mark = self.folder / phases.CANCEL_MARK
            if cancelled and not mark.exists():
                store.write_private(mark, token.encode())

    def time_of_cancel(self) -> float:
        """Return when the job was cancelled (monotonic): `kill` marks it first, and then ends launchers."""
        marked = phases.cancelled_at(self.folder)
        return time.monotonic() - (0.0 if marked is None else max(time.time() - marked, 0.0))


def note(folder: Path, text: str, *, launcher: bool = False, ranks: bool = True) -> None:
    """Write what the agents do with the job into the log of every rank on this node, unless not `ranks`; into
    that of the launcher, which `logs` shows as well, if no rank has one yet, or if `launcher`."""
    shown = "".join(char if char.isprintable() else "?" for char in text)  # it may hold names of files
    logs = [path for _, path in phases.rank_files(folder, ".log")] if ranks else []
    for path in [*([folder / "launcher.log"] if launcher or not logs else []), *logs]:
        note_in(path, shown)


def note_in(log: Path, text: str) -> None:
    line = f"{NOTE}{text} ---\n".encode(errors="replace")
    with contextlib.suppress(OSError), open(log, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        # A progress bar ends with a carriage return: the note would overwrite its last state.
        complete = size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
        file.write(line if complete else b"\n" + line)


def end_own(request: StartRequest, state: Optional[StateFile], verdict: Verdict) -> None:
    """Record how a job has ended on this node, also without what may be secret, for a report."""
    folder, first = store.job_folder(request.job), verdict.first
    if first is not None:
        lines = masked("\n".join(verdict.last_lines), request.secrets, MAX_LINE).split("\n")
        keep(folder / MASKED_FILE, Masked(masked(first.detail, request.secrets), tuple(lines)))
    end(folder, state, verdict)


def end(folder: Path, state: Optional[StateFile], verdict: Verdict) -> None:
    """Record how a job has ended: first the verdict, so that every ended `state` has one."""
    verdict = verdict if verdict.at is not None else replace(verdict, at=time.time())
    store.write(folder / phases.VERDICT_FILE, verdict)
    if state is not None:
        ended = replace(state, state=verdict.phase, ended=verdict.at, exit_code=verdict.exit_code)
        store.write(folder / phases.STATE_FILE, ended)


# -- what the agents have noticed: stragglers, and a stall that was left alone -------------------------------


def stragglers_of(folder: Path) -> tuple[Straggler, ...]:
    found = store.read(folder / STRAGGLERS_FILE, Stragglers)
    return () if found is None else found.known[:MAX_STRAGGLERS]


def stall_of(folder: Path) -> Optional[ToleratedStall]:
    return store.read(folder / STALL_FILE, ToleratedStall)


def elsewhere(folder: Path, project: Path) -> dict[int, tuple[str, ...]]:
    """Return the files that other nodes, by number, have reported as written, and this one lacks."""
    found: dict[int, tuple[str, ...]] = {}
    for path in folder.glob("wrote-*.json"):
        node, wrote = path.stem[len("wrote-") :], store.read(path, Wrote)
        if wrote is not None and node.isascii() and node.isdigit() and len(found) < MAX_NODES:
            found[int(node)] = tuple([name for name in wrote.names if not os.path.lexists(project / name)])
    return found


def close_noticed(folder: Path) -> None:
    """Record that neither a stall nor a straggler is left: the ranks have ended."""
    now = time.time()
    stall = stall_of(folder)
    if stall is not None and stall.until is None:
        keep(folder / STALL_FILE, replace(stall, until=max(now, stall.since)))
    known = stragglers_of(folder)
    if any(one.until is None for one in known):
        ended = [replace(one, until=max(now, one.since)) if one.until is None else one for one in known]
        keep(folder / STRAGGLERS_FILE, Stragglers(tuple(ended)))


def keep(path: Path, record: Any) -> None:
    """Write a file of the job, unless the disk is full."""
    with contextlib.suppress(OSError):  # a full disk ends no job
        store.write(path, record)


class Clocks:
    """By how much the clock of this node is ahead of those of the others at most, in one attempt of a job: in
    a file of its folder.

    A heartbeat has the time at which it was sent. The difference to the time here is how much this clock is
    ahead, and how long the message took: so the least of a few is closest. Clocks drift and are set, so the
    largest of these bounds is kept.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self._path = folder / f"clocks-{attempt}.json"
        self._latest: dict[int, deque[int]] = {}  # node -> ns
        self._ahead: dict[str, int] = {}

    def heard(self, node: int, sent: int, now: int) -> None:
        """Take when a message was sent, by its sender's clock, and came, by this one's (ns)."""
        latest = self._latest.setdefault(node, deque(maxlen=FEW))
        before = self._ahead.get(str(node))
        has_few = len(latest) == FEW
        latest.append(now - sent)
        bound = max(min(latest), before) if has_few and before is not None else min(latest)
        if bound != before:
            self._ahead[str(node)] = bound
            # On a full disk nothing is known of the clocks: the reserve is for how the job ends.
            with contextlib.suppress(OSError):
                temporary = self._path.with_suffix(".tmp")
                temporary.write_bytes(encode(self._ahead))
                temporary.replace(self._path)


def ahead(folder: Path, attempt: int) -> dict[str, int]:
    """Return the bounds (ns) of an attempt of the job with this folder, by node."""
    return store.read(folder / f"clocks-{attempt}.json", dict[str, int]) or {}
