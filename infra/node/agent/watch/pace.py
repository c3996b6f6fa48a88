"""The pace of this node's ranks, from the files in which they report their steps."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.progress import MAX_STEP_SECONDS, Pace, StepReport

REPORT_LIMIT = 1 << 14  # bytes
LEAST = 3  # reports that a pace is the median of
MOST = 100
LOOKS = 30  # in the time for which reports count
SLACK = 0.2  # seconds by which the time of a file may differ from when it was noticed


def step_report(path: Path) -> Optional[StepReport]:
    """Return what a rank last reported, or None. A script may write anything there: what is not a number in
    range is dropped, without a step all of it."""
    try:
        found = json.loads(store.read_bytes(path, REPORT_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    if type(step) is not int:
        return None
    work = found.get("work_seconds")
    is_time = type(work) in (int, float) and 0 < work <= MAX_STEP_SECONDS
    try:
        return StepReport(step, float(work) if is_time else None)
    except ProtocolError:
        return None


def median(values: Sequence[float]) -> float:
    """Return the lower median. (`statistics` takes 10 ms to import.)"""
    return sorted(values)[(len(values) - 1) // 2]


class _Sample(NamedTuple):
    at: float  # by the monotonic clock
    seconds: float
    own: bool


class _Rank:
    """The reports of one rank."""

    def __init__(self) -> None:
        self.step: Optional[int] = None
        self._noticed = 0.0  # by the monotonic clock
        self._written = 0.0  # by the file system's
        self._samples: deque[_Sample] = deque(maxlen=MOST)

    def take(self, report: StepReport, written: float, now: float, pause: float) -> None:
        """Take a report that was written at `written`, by the clock of the file system, and noticed at `now`;
        `pause` is the time between two looks."""
        steps = report.step - self.step if self.step is not None else None
        if steps == 0:
            return
        seconds = report.work_seconds
        if seconds is None and steps is not None and steps > 0:
            interval = written - self._written
            # Otherwise the clock was set, or the time.
            if abs(interval - (now - self._noticed)) <= 2 * pause + SLACK:
                seconds = interval / steps
        if steps is not None and steps < 0:  # it has begun again
            self._samples.clear()
        if seconds is not None and seconds > 0:
            self._samples.append(
                _Sample(now, min(seconds, MAX_STEP_SECONDS), report.work_seconds is not None)
            )
        self.step, self._noticed, self._written = report.step, now, written

    def pace(self, rank: int, oldest: float) -> Optional[Pace]:
        """Return the median of the reports since `oldest`; of slow ranks, of the last ones. One step that
        took long does not change a median."""
        if self.step is None or not self._samples:
            return None
        own = self._samples[-1].own
        same = [one for one in self._samples if one.own is own]
        recent = [one for one in same if one.at >= oldest]
        chosen = recent if len(recent) >= LEAST else same[-LEAST:]
        if len(chosen) < LEAST:
            return None
        return Pace(rank, self.step, median([one.seconds for one in chosen]), own)


class Reports:
    """The step reports of this node's ranks, of the last `window` seconds."""

    def __init__(self, folder: Path, window: float) -> None:
        self._folder = folder
        self._window = window
        self.pause = window / LOOKS
        self._looked_at = float("-inf")
        self._ranks: dict[int, _Rank] = {}
        self._times: dict[int, int] = {}

    def paces(self) -> tuple[Pace, ...]:
        """Return the pace of each rank that has reported often enough."""
        now = time.monotonic()
        if now - self._looked_at >= self.pause:
            self._looked_at = now
            self._look(now)
        found = (one.pace(rank, now - self._window) for rank, one in sorted(self._ranks.items()))
        return tuple(pace for pace in found if pace is not None)

    def _look(self, now: float) -> None:
        for rank, _ in phases.rank_files(self._folder, ".json"):
            path = store.step_file(self._folder, rank)
            try:
                written = os.lstat(path).st_mtime_ns
            except OSError:
                continue
            if written == self._times.get(rank):
                continue
            self._times[rank] = written
            report = step_report(path)
            if report is not None:
                self._ranks.setdefault(rank, _Rank()).take(report, written / 1e9, now, self.pause)
