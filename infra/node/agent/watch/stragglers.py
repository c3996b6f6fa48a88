"""Stragglers: ranks whose steps stay slower than those of the others.

Each agent reads the pace of its ranks from the files in which they report their steps, and sends it in its
heartbeats. The first node compares them and sends what has changed; every node keeps it with the job, and
notes it in the logs of its own ranks. So it holds with nobody connected, and a follower shows it once.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from agent.jobs import job_record, phases
from agent.node import store
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.gang import Kind, PeerMessage
from cloudddp.agent.protocol.progress import (
    MAX_STEP_SECONDS,
    MAX_STRAGGLERS,
    RECOVERED,
    SLOW,
    Pace,
    StepReport,
    Straggler,
    Stragglers,
)

REPORT_LIMIT = 1 << 14  # bytes
LEAST = 3  # reports that a pace is the median of
MOST = 100
LOOKS = 30  # in the time for which reports count
SLACK = 0.2  # seconds by which the time of a file may differ from when it was noticed
STEPS = 5  # in which a rank has to stay slow


def step_report(path: Path) -> Optional[StepReport]:
    """Return what a rank last reported, if it has a step. A script may write anything there."""
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


class _Rank:
    """The reports of one rank."""

    def __init__(self) -> None:
        self.step: Optional[int] = None
        self._noticed = 0.0  # by the monotonic clock
        self._written = 0.0  # by the file system's
        # When, by the monotonic clock, and the seconds; whether they are of its own work.
        self._samples: deque[tuple[float, float, bool]] = deque(maxlen=MOST)

    def take(self, report: StepReport, written: float, now: float, pause: float) -> None:
        """Take a report that was `written` (by the file system), noticed `now`, after a `pause`."""
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
            self._samples.append((now, min(seconds, MAX_STEP_SECONDS), report.work_seconds is not None))
        self.step, self._noticed, self._written = report.step, now, written

    def pace(self, rank: int, oldest: float) -> Optional[Pace]:
        """Return the median of the reports since `oldest`, of slow ranks that of the last ones."""
        if self.step is None or not self._samples:
            return None
        own = self._samples[-1][2]
        same = [(at, seconds) for at, seconds, is_own in self._samples if is_own is own]
        recent = [one for one in same if one[0] >= oldest]
        chosen = recent if len(recent) >= LEAST else same[-LEAST:]
        if len(chosen) < LEAST:
            return None
        return Pace(rank, self.step, median([seconds for _, seconds in chosen]), own)


class StepReports:
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


class Detector:
    """Compares the ranks. A rank is a straggler when its pace has stayed SLOW times the median for `window`
    seconds and STEPS steps, and no longer one when it has stayed below RECOVERED times the median as long.
    Between the two limits nothing changes. Pure."""

    def __init__(self, window: float, known: Iterable[Straggler] = ()) -> None:
        self._window = window
        self.known: dict[int, Straggler] = {one.rank: one for one in known}
        self._turns: dict[int, tuple[float, int]] = {}  # when and at which step a rank has crossed a limit

    def look(self, paces: Mapping[int, Iterable[Pace]], now: float, clock: float) -> bool:
        """Take the pace of the ranks of each node; return whether the stragglers have changed. `now` is a
        monotonic clock, `clock` seconds since the epoch.

        The lower median is compared with: with two ranks it is the faster one, and if one of two nodes is
        slow, a rank of the other. Where any rank reports the time of its own work, intervals between reports
        are not compared.
        """
        listed = [(node, rank) for node, ranks in paces.items() for rank in ranks]
        own = any(one.own for _, one in listed)
        listed = [(node, one) for node, one in listed if one.own is own]
        if len(listed) < 2:
            return False
        middle = median([one.seconds for _, one in listed])
        changed = False
        for node, one in listed:
            changed = self._compare(node, one, middle, now, clock) or changed
        return changed

    def _compare(self, node: int, pace: Pace, middle: float, now: float, clock: float) -> bool:
        before = self.known.get(pace.rank)
        is_one = before is not None and before.until is None
        turned = pace.seconds < RECOVERED * middle if is_one else pace.seconds >= SLOW * middle > 0
        if not turned:
            self._turns.pop(pace.rank, None)
            return False
        at, step = self._turns.setdefault(pace.rank, (now, pace.step))
        if now - at < self._window or pace.step - step < STEPS:
            return False
        del self._turns[pace.rank]
        if before is not None and is_one:
            found = replace(before, seconds=pace.seconds, median=middle, until=max(clock, before.since))
        else:
            since = max(clock - (now - at), 0.0)
            found = Straggler(pace.rank, node, pace.seconds, middle, step, since, pace.own)
        self.known[pace.rank] = found
        return True

    def all(self) -> tuple[Straggler, ...]:
        """Return all that are known, by rank; of more than can be kept, the slow ones first."""
        order = sorted(self.known.values(), key=lambda one: (one.until is not None, -one.ratio))
        return tuple(sorted(order[:MAX_STRAGGLERS], key=lambda one: one.rank))


class StragglerWatch:
    """The watch over one attempt of a job, on one node."""

    def __init__(self, node: int, folder: Path, window: float, send: Callable[[PeerMessage], None]) -> None:
        """`window`: seconds for which a rank has to stay slow; 0 where nobody wants to know."""
        self._node, self._folder, self._send = node, folder, send
        self._window = window
        self._reports = StepReports(folder, window)
        self._paces: dict[int, tuple[Pace, ...]] = {}
        self._looked_at = float("-inf")
        self._detector = Detector(window, job_record.stragglers_of(folder))

    def paces(self) -> tuple[Pace, ...]:
        """Return the pace of this node's ranks."""
        return self._reports.paces() if self._window > 0 else ()

    def heard(self, node: int, paces: tuple[Pace, ...]) -> None:
        self._paces[node] = paces

    def compare(self) -> bool:
        """Find ranks that are slow, or have caught up. Called on the first node. Return what `keep` does."""
        now = time.monotonic()
        if self._window <= 0 or now - self._looked_at < self._reports.pause:
            return False
        self._looked_at = now
        self._paces[self._node] = self.paces()
        if not self._detector.look(self._paces, now, time.time()):
            return False
        self._send(PeerMessage(Kind.STRAGGLERS, stragglers=self._detector.all()))
        return self.keep(self._detector.all())

    def keep(self, known: tuple[Straggler, ...]) -> bool:
        """Keep the stragglers with the job, and note what is new of this node's ranks; return if any."""
        before = job_record.stragglers_of(self._folder)
        job_record.keep(self._folder / job_record.STRAGGLERS_FILE, Stragglers(known))
        new = [one for one in known if one.node == self._node and one not in before]
        for one in new:
            text = f"straggler: {one.text} since step {one.step}"
            if one.until is not None:
                pace = f"{one.seconds:.3g} s per step, median {one.median:.3g} s"
                text = f"straggler: rank {one.rank} has caught up ({pace})"
            job_record.note_in(self._folder / "ranks" / f"{one.rank}.log", text)
        return bool(new)
