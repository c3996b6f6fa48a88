"""One attempt to run a job's ranks on this node: from the start of the launchers until no process is left."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.jobs import job_record, phases, rank_records
from agent.node import processes, store
from agent.ranks import causes, launchers
from agent.ranks.causes import TimedFailure
from cloudddp.agent.protocol import NOT_STARTED
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import Observed, Report
from cloudddp.agent.protocol.jobs import Cause, Failure, RankRecord
from cloudddp.agent.protocol.start import StartRequest

# Seconds for the record of a rank's end to be seen, which its wrapper wrote before it ended itself.
WRAPPER_SECONDS = 0.2
# Seconds for a wrapper that runs: after the end of the rank's main thread, others may still free its memory.
BUSY_SECONDS = 30.0
TICK = 20_000_000  # nanoseconds: file systems count time in steps of up to 10 ms


class Attempt:
    """The ranks of one attempt on this node. The first one has the number 0."""

    def __init__(self, request: StartRequest, folder: Path, number: int) -> None:
        self.number = number
        self.stopped_at: Optional[float] = None  # when the ranks were asked to end
        self.error = ""  # why the ranks could not be started
        self._request = request
        self._folder = folder
        self._task = phases.task(folder, request.node, own=True)
        self._kernel = causes.Kernel.now()
        self._children: list[launchers.Child[bytes]] = []
        self._failures: list[TimedFailure] = []  # that are no rank's own end
        self._failed_launchers: dict[int, TimedFailure] = {}  # by pid
        self._gone: dict[int, float] = {}  # ranks that have ended without a record, and since when
        self._records: list[RankRecord] = []
        self._records_changed = -1
        self._failed_at: Optional[float] = None  # when a failed rank was first seen
        self._ending: Optional[threading.Thread] = None
        self._latest = float("inf")  # when the grace of the ranks ends

    def launch(self, *, torch: str = "") -> None:
        """Start the launchers. An error becomes a failure of the attempt. `torch`: its version, if known."""
        try:
            for process in self._request.work.processes:
                if not phases.is_stopping(self._folder):
                    self._children.append(
                        launchers.launch(self._request, process, self._task, attempt=self.number, torch=torch)
                    )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
            self.error = str(error)
            if isinstance(error, OSError):
                self.error = f"{error.filename or 'process'}: {error.strerror}"
            detail = self.error[:MAX_TEXT]
            failure = Failure(self._request.node, Cause.START, exit_code=NOT_STARTED, detail=detail)
            self.fail(Observed(failure, 0.0))

    @property
    def succeeded(self) -> bool:
        """Whether every rank of this node has exited with 0."""
        expected = self._request.work.ranks
        return len(self._records) == expected and all(record.exit_code == 0 for record in self._records)

    @property
    def is_over(self) -> bool:
        """Whether the ranks were asked to end, and no process is left."""
        return self._ending is not None and not self._ending.is_alive()

    def fail(self, observed: Observed) -> None:
        """Keep a failure that is no rank's own end."""
        self._failures.append(TimedFailure(time.monotonic(), observed))

    def look(self) -> tuple[bool, bool]:
        """Return whether a rank or a launcher has failed by itself, and whether every launcher has ended."""
        # Polled first: a launcher that ends later in this look, or one of its ranks, may have failed, which
        # the next look finds.
        ended = all(child.poll() is not None for child in self._children)
        self._read_records()
        self._notice_killed_wrappers()
        self._notice_launchers()
        launchers.collect_orphans(self._children)
        failed = bool(self._failures) or (not self._request.work.max_restarts and self._has_failed_rank())
        return failed or (bool(self._failed_launchers) and not self.succeeded), ended

    def end(self, grace: float, *, saving: bool = False) -> None:
        """Ask the ranks to end, and kill them after `grace` seconds; another thread does it. A second call
        can only shorten the grace.

        `saving`: the ranks may need all of it. torchrun, asked to end, would kill them after 30 s (before
        2.15), so they are asked themselves; not with max_restarts, since it would start them again.
        """
        self._latest = min(self._latest, time.monotonic() + grace)
        if self.stopped_at is None:
            self._notice_launchers()  # before their ranks are ended
            self.stopped_at = time.monotonic()
            self._ending = threading.Thread(
                target=processes.end,
                args=(self._task, grace, self._children),
                daemon=True,
                kwargs={
                    "latest": lambda: self._latest,
                    "first": self._wrappers if saving and not self._request.work.max_restarts else tuple,
                },
            )
            self._ending.start()

    def running_ranks(self) -> list[int]:
        """Return the pids of the ranks that run."""
        return [one.pid for one in rank_records.running(self._folder) if one.pid]

    def _wrappers(self) -> list[int]:
        """Return the wrappers of the ranks that run."""
        found = map(processes.parent, self.running_ranks())
        return [one for one in found if one is not None and one > 1]

    def join(self) -> None:
        """Wait until no process is left."""
        if self._ending is not None:
            self._ending.join()

    def report(self, cancelled: Optional[float]) -> Report:
        """Return how the attempt ended here. `cancelled`: seconds since the user cancelled the job here."""
        rank_records.settle(self._folder, rank_records.read(self._folder), asked=True)
        self._records_changed = -1
        self._read_records()
        stopped = self.stopped_at or time.monotonic()
        failures = [
            causes.of_rank(self._folder, self._request.node, record, self._kernel)
            for record in causes.failed_ranks(self._records)
            if record.at is None or record.at <= stopped
        ]
        seen = list(self._failures)
        if not failures and not self.succeeded:  # otherwise the launcher has failed because of them
            seen += self._failed_launchers.values()
        failures += [replace(one.observed, ago=causes.ago_of(one.at)) for one in seen]
        code = next((one.exit_code for one in self._records if one.exit_code), None)
        training = rank_records.training_status(self._folder)
        step = training.step if training else None
        exits = causes.exits(self._request.node, self._records, stopped)
        return Report(self.succeeded, tuple(failures), cancelled, code, step, exits)

    def _has_failed_rank(self) -> bool:
        """Whether a rank has failed. One that has lost another rank waits for the end of that one."""
        failed = causes.failed_ranks(self._records)
        if not failed:
            return False
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > causes.SETTLE:
            return True
        found = [causes.of_rank(self._folder, self._request.node, one, self._kernel) for one in failed]
        return not all(map(causes.is_consequence, found))

    # -- looking ---------------------------------------------------------------------------------------------

    def _read_records(self) -> None:
        """Read the ranks' records if one has changed: each is replaced, which changes the folder's mtime. A
        recent change is read again: another one within the same tick would not show."""
        with contextlib.suppress(OSError):
            changed = os.stat(self._folder / "ranks").st_mtime_ns
            if changed != self._records_changed:
                tick_is_over = abs(time.time_ns() - changed) > TICK
                self._records = rank_records.read(self._folder)
                self._records_changed = changed if tick_is_over else -1

    def _notice_launchers(self) -> None:
        """Keep when a launcher has failed."""
        for child in self._children:
            code = child.poll()
            if code and child.pid not in self._failed_launchers:
                found = causes.of_launcher(self._folder, self._request.node, code, self._kernel)
                self._failed_launchers[child.pid] = TimedFailure(time.monotonic(), found)

    def _notice_killed_wrappers(self) -> None:
        """Record the end of a rank whose wrapper was killed, too. An intact one does it in milliseconds."""
        now = time.monotonic()
        for record in self._records:
            if record.exit_code is not None or not record.pid or processes.born(record.pid):
                continue
            pid, _, born = record.wrapper.partition(":")
            intact = pid.isdigit() and processes.runs(int(pid), born)
            if now - self._gone.setdefault(record.rank, now) > (BUSY_SECONDS if intact else WRAPPER_SECONDS):
                rank_records.settle(self._folder, [record], asked=False)


def clear(folder: Path) -> None:
    """Remove what the last attempt has left in a job's folder, but for its logs."""
    for path in (folder / "ranks").glob("*.json"):
        path.unlink(missing_ok=True)
    for path in (folder / store.STEPS_FOLDER).glob("*"):
        path.unlink(missing_ok=True)
    job_record.close_noticed(folder)
    (folder / phases.STOPPED_MARK).unlink(missing_ok=True)
