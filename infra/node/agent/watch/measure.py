"""What this node measures of its GPUs and ranks: for `cloudddp top`, and for the record of a job."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.files.scan import Scan
from agent.jobs import phases, rank_records
from agent.node import kernel, store
from agent.watch.gpus import Gpus
from agent.watch.stragglers import LOOKS, StepReports, step_report
from agent.watch.usage import ResourceUsage
from cloudddp.agent.protocol import event_files
from cloudddp.agent.protocol.codec import ProtocolError, encode_utf8
from cloudddp.agent.protocol.progress import Pace
from cloudddp.agent.protocol.readings import MAX_METRICS, MAX_SHOWN_LINE, READINGS_FILE, RankReading, Reading

RECORD_SECONDS = 10.0  # between two readings that are kept; less at first, so that short jobs have curves
RECORD_PART = 500  # of the age of a long job
SEARCH_SECONDS, AGAIN_SECONDS = 1.0, 10.0  # of a search, and between two
MAX_FILES = 8  # the newest; add_scalars writes one for each curve
FILE_BYTES, LOG_BYTES = 1 << 15, 1 << 14  # of the end of a file


class RankZero:
    """What rank 0 shows of a training on this node without reporting it: the newest scalars in TensorBoard's
    event files below `project`, and the last line of its log. Of files only the ends are read, and a search
    has a time limit: a project may have millions of files, and an event file may have any size."""

    def __init__(self, folder: Path, project: Path) -> None:
        self._project = project
        self._log = folder / "ranks" / "0.log"
        self._since = phases.began_at(folder)
        self._files: list[Path] = []
        self._searched = float("-inf")
        self._newest: dict[str, Optional[float]] = {}

    def added(self, reading: Reading) -> Reading:
        """Return a reading with what rank 0 shows, where it runs here."""
        if not os.path.lexists(self._log):
            return reading
        reports = reading.metrics.keys() - {"step", "steps"}
        metrics = reading.metrics if reports else self._scalars() or reading.metrics
        return replace(reading, metrics=metrics, line=self._last_line())

    def _scalars(self) -> dict[str, Optional[float]]:
        """Return the newest value of each scalar of the job, of a few; None for NaN and infinity."""
        if time.monotonic() - self._searched >= AGAIN_SECONDS:
            new = Scan(self._project, (), (), self._since, again=0, seconds=SEARCH_SECONDS)
            found = sorted((one.ctime, one.found.name) for one in new if event_files.EVENTS in one.found.name)
            self._files = [self._project / name for _, name in found[-MAX_FILES:]]
            self._searched = time.monotonic()
        for path in self._files:
            with contextlib.suppress(OSError), store.open_regular(path) as file:
                for row in event_files.last_rows(file, FILE_BYTES):
                    if row.at >= self._since / 1e9 - 1:  # clocks of file systems lag
                        for tag, value in row.values.items():
                            if tag in self._newest or len(self._newest) < MAX_METRICS:
                                self._newest[tag] = value if math.isfinite(value) else None
        return dict(self._newest)

    def _last_line(self) -> str:
        """Return the last line of its log that is not blank, and the last state of a progress bar."""
        with contextlib.suppress(OSError), store.open_regular(self._log) as file:
            begin = max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0)
            text = os.pread(file.fileno(), LOG_BYTES, begin).decode(errors="replace").rstrip()
            return re.split(r"[\r\n]", text)[-1].strip()[:MAX_SHOWN_LINE]
        return ""


class Measuring:
    """The GPUs, and the ranks of a job, measured every `interval` seconds; with what rank 0 shows in its
    `project`, where that is given."""

    def __init__(self, folder: Path, gpus: Gpus, interval: float, project: Optional[Path] = None) -> None:
        self.folder = folder
        self._rank_zero = RankZero(folder, project) if project else None
        self._gpus = gpus
        self._reports = StepReports(folder, LOOKS / 2 * interval)
        self._use = ResourceUsage()

    def take(self) -> Reading:
        at, running = round(time.time(), 2), rank_records.running(self.folder)
        used = self._use.look({one.rank: one.pid for one in running if one.pid})
        cores = {rank: round(ticks / kernel.TICKS / seconds, 2) for rank, (ticks, _, seconds) in used.items()}
        paces = {pace.rank: pace for pace in self._reports.paces()}
        ranks = [self._rank(one.rank, cores.get(one.rank), paces.get(one.rank)) for one in running]
        found = Reading(at, self._gpus.read(), tuple(ranks), rank_records.metrics(self.folder))
        return self._rank_zero.added(found) if self._rank_zero else found

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
