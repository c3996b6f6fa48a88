"""What this node measures of its GPUs and ranks: for `cloudddp top`, and for the record of a job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from agent.jobs import rank_records
from agent.node import kernel, processes, store
from agent.watch.activity import grown
from agent.watch.gpus import Gpus
from agent.watch.pace import LOOKS, Reports, step_report
from cloudddp.agent.protocol.codec import ProtocolError, encode_utf8
from cloudddp.agent.protocol.progress import Pace
from cloudddp.agent.protocol.readings import MAX_READING_RANKS, READINGS_FILE, RankReading, Reading

LIST_SECONDS = 10.0  # between two searches for children of ranks: a node has thousands of processes
RECORD_SECONDS = 10.0  # between two readings that are kept with a job, at first
MAX_LINES = 2000
MAX_BYTES = 64 << 20  # of the file with them


class Measuring:
    """The GPUs, and the ranks of a job, measured every `interval` seconds. Without a folder there is no
    job."""

    def __init__(self, folder: Optional[Path], gpus: Gpus, interval: float) -> None:
        self._folder, self._gpus = folder, gpus
        self._reports = Reports(folder or Path(os.devnull), LOOKS / 2 * interval)
        self._roots: dict[int, int] = {}  # the process of each rank
        self._trees: dict[int, list[int]] = {}
        self._listed_at = self._looked_at = float("-inf")
        self._ticks: dict[int, dict[int, int]] = {}  # by rank and process

    def take(self) -> Reading:
        at, gpus, folder = round(time.time(), 2), self._gpus.read(), self._folder
        if folder is None:
            return Reading(at, gpus)
        running = rank_records.running(folder)[:MAX_READING_RANKS]
        cores = self._cores({one.rank: one.pid for one in running if one.pid})
        paces = {one.rank: one for one in self._reports.paces()}
        ranks = [_rank(folder, one.rank, cores.get(one.rank), paces.get(one.rank)) for one in running]
        return Reading(at, gpus, tuple(ranks), rank_records.metrics(folder))

    def _cores(self, roots: Mapping[int, int]) -> dict[int, float]:
        """Return how many cores each rank and its children have used since the last look. A child counts
        from the second look at it on."""
        now = time.monotonic()
        if self._roots != roots or now - self._listed_at >= LIST_SECONDS:
            self._roots, self._listed_at = dict(roots), now
            self._trees = processes.trees(roots.values())
        before, seconds, self._looked_at = self._ticks, now - self._looked_at, now
        self._ticks = {
            rank: {p: kernel.cpu_ticks(p) for p in self._trees[pid]} for rank, pid in roots.items()
        }
        return {
            rank: round(grown({**own, **before[rank]}, own) / kernel.TICKS / max(seconds, 0.01), 2)
            for rank, own in self._ticks.items()
            if rank in before
        }


def _rank(folder: Path, rank: int, cores: Optional[float], pace: Optional[Pace]) -> RankReading:
    report = step_report(store.step_file(folder, rank))
    step, seconds = (None, None) if report is None else (report.step, report.work_seconds)
    own = seconds is not None
    if pace is not None:
        seconds, own = pace.seconds, pace.own
    return RankReading(rank, cores, step, None if seconds is None else float(f"{seconds:.4g}"), own)


class Recorder:
    """Keeps readings with a job, also with nobody connected: MAX_LINES at most, of a long one fewer."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / READINGS_FILE
        self._measuring = Measuring(folder, Gpus(RECORD_SECONDS), RECORD_SECONDS)
        self._interval = RECORD_SECONDS
        self._due = 0.0  # by the monotonic clock
        self._lines = 0

    def turn(self) -> None:
        """Keep a reading if one is due. A full disk, or a rank that damages the file, ends no job."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._interval
            with contextlib.suppress(OSError, ProtocolError):
                self.keep(self._measuring.take())

    def keep(self, reading: Reading) -> None:
        """Append a reading; of too many, keep every second one. Raises OSError."""
        with store.open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
            file.write(encode_utf8(reading) + b"\n")
        self._lines += 1
        if self._lines > MAX_LINES:
            lines = store.read_bytes(self._path, MAX_BYTES).splitlines(keepends=True)[::2]
            store.replace(self._path, b"".join(lines))
            self._lines, self._interval = len(lines), 2 * self._interval
