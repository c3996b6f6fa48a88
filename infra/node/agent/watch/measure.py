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
from agent.watch.gpus import Gpus
from agent.watch.pace import LOOKS, Reports, step_report
from cloudddp.agent.protocol.codec import ProtocolError, encode_utf8
from cloudddp.agent.protocol.progress import Pace
from cloudddp.agent.protocol.readings import READINGS_FILE, RankReading, Reading

LIST_SECONDS = 10.0  # between two searches for children of ranks: a node has thousands of processes
RECORD_SECONDS = 10.0  # between two readings that are kept; less at first, so that short jobs have curves
RECORD_PART = 500  # of the age of a long job


class Measuring:
    """The GPUs, and the ranks of a job, measured every `interval` seconds."""

    def __init__(self, folder: Path, gpus: Gpus, interval: float) -> None:
        self.folder = folder
        self._gpus = gpus
        self._reports = Reports(folder, LOOKS / 2 * interval)
        self._trees: dict[int, list[int]] = {}  # by the process of each rank
        self._listed_at = self._looked_at = float("-inf")
        self._ticks: dict[int, int] = {}  # by process

    def take(self) -> Reading:
        at, running = round(time.time(), 2), rank_records.running(self.folder)
        cores = self._cores({one.rank: one.pid for one in running if one.pid})
        paces = {one.rank: one for one in self._reports.paces()}
        ranks = [self._rank(one.rank, cores.get(one.rank), paces.get(one.rank)) for one in running]
        return Reading(at, self._gpus.read(), tuple(ranks), rank_records.metrics(self.folder))

    def _cores(self, roots: Mapping[int, int]) -> dict[int, float]:
        """Return how many cores each rank and its children have used since the last look. A process counts
        from the second look at it on."""
        is_old = time.monotonic() - self._listed_at >= LIST_SECONDS
        if is_old or self._trees.keys() != set(roots.values()):
            self._trees, self._listed_at = processes.trees(roots.values()), time.monotonic()
        now = time.monotonic()  # a list takes a while
        before, seconds, self._looked_at = self._ticks, now - self._looked_at, now
        self._ticks = {pid: kernel.cpu_ticks(pid) for tree in self._trees.values() for pid in tree}
        used = {pid: max(ticks - before[pid], 0) for pid, ticks in self._ticks.items() if pid in before}
        return {
            rank: round(sum(used.get(pid, 0) for pid in self._trees[root]) / kernel.TICKS / seconds, 2)
            for rank, root in roots.items()
            if root in used
        }

    def _rank(self, rank: int, cores: Optional[float], pace: Optional[Pace]) -> RankReading:
        report = step_report(store.step_file(self.folder, rank))
        if report is None:
            status = rank_records.training_status(self.folder) if rank == 0 else None
            return RankReading(rank, cores, status.step if status else None)
        return RankReading(rank, cores, report.step, report.work_seconds if pace is None else pace.seconds)


class Recorder:
    """Keeps readings with a job, also with nobody connected."""

    def __init__(self, folder: Path, gpus: Gpus) -> None:
        self._measuring = Measuring(folder, gpus, RECORD_SECONDS)
        self._began = self._due = time.monotonic()

    def turn(self) -> None:
        """Keep a reading if one is due. A full disk, or a rank that damages the file, ends no job."""
        now = time.monotonic()
        if now < self._due:
            return
        age = now - self._began
        self._due = now + max(1.0, min(age / 20, RECORD_SECONDS), age / RECORD_PART)
        path, access = self._measuring.folder / READINGS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT
        with contextlib.suppress(OSError, ProtocolError), store.open_regular(path, access) as file:
            file.write(encode_utf8(self._measuring.take()) + b"\n")
