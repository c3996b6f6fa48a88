"""How a rank's wrapper waits for its end, and ends it: it records that the rank runs and how it ended,
forwards signals, and does the agent's part where that was killed.

The kernel signals the wrapper when its parent ends (PR_SET_PDEATHSIG), but that parent may be a launcher that
lives on although the agent is dead, and a signal alone does not end a rank that ignores it. So a thread of
the wrapper looks whether guard or supervisor run: where neither does, it asks the rank to end, and kills it
after the job's grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Optional

from agent.jobs import phases
from agent.node import kernel, processes, store
from agent.ranks import causes, rank_log
from cloudddp.agent.protocol import NOT_STARTED
from cloudddp.agent.protocol.gang import Observed
from cloudddp.agent.protocol.jobs import Cause, Failure, RankRecord

INTERVAL = 0.5  # seconds between two looks
PAUSE = 0.05  # seconds between two looks at what a rank has left behind
DYING_SECONDS = 1.0  # that an agent may take to end after SIGKILL, on a busy machine
# Seconds between two looks whether the launcher has ended a rank that has lost another one.
SETTLE_PAUSE = 0.02
LONGEST_GRACE = 910.0  # seconds: longer than any setting of stop_grace or save_minutes


class RankEnd:
    """Ends the rank `child` of the job in `folder`. `forwarded` holds the signals that it was sent."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path, grace: float) -> None:
        self.forwarded: set[int] = set()
        self._child = child
        self._folder = folder
        self._grace = grace
        self._asked_at: Optional[float] = None
        self._gone_at: Optional[float] = None  # when the agent was first seen to be gone
        self._family: dict[int, str] = {}  # pid -> born, of the rank's processes
        for number in kernel.ASK_TO_END:
            signal.signal(number, self._forward)

    def _forward(self, received: int, _: Any = None) -> None:
        """Forward each signal once."""
        if received in self.forwarded:
            return
        self.forwarded.add(received)
        self._asked_at = self._asked_at or time.monotonic()
        self._remember()
        self._child.send_signal(received)

    def look(self) -> None:
        """Look whether the agent runs. Called by the watcher's thread; the main thread handles signals."""
        now = time.monotonic()
        if phases.agent_runs(self._folder):
            if self._asked_at is not None and now - self._asked_at > LONGEST_GRACE:
                self._child.kill()
            return
        self._gone_at = self._gone_at or now
        if signal.SIGTERM not in self.forwarded:
            os.kill(os.getpid(), signal.SIGTERM)  # so that one thread forwards
        if now - self._gone_at > self._grace:
            self._remember()
            self._send(signal.SIGKILL)

    def finish(self) -> None:
        """The rank has ended. Where the agent is gone, end what it has left behind: nobody else would.

        After a signal, which may be the news of the agent's death, look for a while: a process that was
        killed still counts as running until it is scheduled again.
        """
        patience = time.monotonic() + (DYING_SECONDS if self.forwarded else 0.0)
        while phases.agent_runs(self._folder):
            if time.monotonic() >= patience or not self._runs():
                return
            time.sleep(PAUSE)
        deadline = (self._gone_at or time.monotonic()) + self._grace
        self._send(signal.SIGTERM)
        while self._runs() and time.monotonic() < deadline:
            time.sleep(PAUSE)
        self._send(signal.SIGKILL)

    def _remember(self) -> None:
        """Keep which processes the rank has: once it has ended they cannot be found by descent."""
        for pid in processes.tree(self._child.pid):
            self._family.setdefault(pid, processes.born(pid))

    def _runs(self) -> bool:
        return any(processes.runs(pid, born) for pid, born in list(self._family.items()))

    def _send(self, number: signal.Signals) -> None:
        for pid, born in list(self._family.items()):  # a signal may come meanwhile
            if processes.runs(pid, born):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def not_started(job: str, rank: int, log: BinaryIO, reason: str) -> int:
    """Record that the rank's command cannot be started; return the exit code for that."""
    log.write(reason.encode())
    log.close()
    ended = RankRecord(rank, NOT_STARTED, time.time(), at=time.monotonic())
    store.write(store.job_folder(job) / "ranks" / f"{rank}.json", ended)
    return NOT_STARTED


def wait(job_id: str, rank: int, log: BinaryIO, child: subprocess.Popen[bytes], errors: str) -> int:
    """Wait for the end of the rank, record it, and return its exit code, -N after signal N.

    `errors` is the file of torch.distributed.elastic.
    """
    folder = store.job_folder(job_id)
    job = phases.job_file(folder) or phases.JobFile(0)
    ending = RankEnd(child, folder, job.stop_grace)
    path, log_path = folder / "ranks" / f"{rank}.json", folder / "ranks" / f"{rank}.log"
    record = RankRecord(rank, None, None, pid=child.pid, wrapper=kernel.name(os.getpid()))
    store.write(path, record)
    keeper = rank_log.Keeper(log, log_path, job.log_mb << 20)
    has_ended = threading.Event()

    def watch() -> None:
        keeper.look()
        while not has_ended.wait(INTERVAL):
            ending.look()
            keeper.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()  # with the signals blocked, so that they wake this thread, which handles them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, kernel.ASK_TO_END)  # that has come since the rank was started
    code = child.wait()
    at = time.monotonic()
    ended = replace(
        record,
        ended=time.time(),
        at=at,
        asked=bool(ending.forwarded),
        signal=-code if code < 0 else None,
        exit_code=128 - code if code < 0 else code,
        error=causes.elastic_error(errors) if code else "",
    )
    store.write(path, ended)
    has_ended.set()
    watcher.join()
    keeper.look()
    ending.finish()
    _let_the_lost_rank_end(log_path, ended, ending.forwarded)
    return code


def _let_the_lost_rank_end(log: Path, ended: RankRecord, forwarded: set[int]) -> None:
    """If the rank failed because it lost another one, wait for the end of that one: torchrun would end it."""
    failure = Failure(0, Cause.RANK, ended.rank, ended.exit_code, ended.signal, ended.error)
    lines, _ = causes.end_of_log(log, ended.exit_code)
    if not ended.exit_code or not causes.is_consequence(Observed(failure, 0.0, lines)):
        return
    deadline = time.monotonic() + causes.SETTLE
    while time.monotonic() < deadline and not forwarded:
        time.sleep(SETTLE_PAUSE)
