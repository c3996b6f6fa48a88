"""Stragglers: ranks whose steps stay slower than those of the others.

Each agent sends the pace of its ranks in its heartbeats. The first node compares them and sends what has
changed; every node keeps it with the job, and notes it in the logs of its own ranks. So it holds with nobody
connected, and a follower shows it once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Callable

from agent.jobs import job_record
from agent.watch.pace import Reports, median
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Kind, Message
from cloudddp.agent.protocol.progress import MAX_STRAGGLERS, RECOVERED, SLOW, Pace, Straggler

STEPS = 5  # in which a rank has to stay slow


@frozen
class _Turn:
    """A rank that has crossed a limit, and since when and where."""

    at: float
    step: int


class Detector:
    """Compares the ranks. A rank is a straggler when its pace has stayed SLOW times the median for `window`
    seconds and STEPS steps, and no longer one when it has stayed below RECOVERED times the median as long.
    Between the two limits nothing changes. Pure."""

    def __init__(self, window: float, known: Iterable[Straggler] = ()) -> None:
        self._window = window
        self.known: dict[int, Straggler] = {one.rank: one for one in known}
        self._turns: dict[int, _Turn] = {}

    def look(self, paces: Mapping[int, Iterable[Pace]], now: float, clock: float) -> bool:
        """Take the pace of the ranks of each node; return whether the stragglers have changed. `now` is a
        monotonic clock, `clock` seconds since the epoch.

        The lower median is compared with: with two ranks it is the faster one, and if one of two nodes is
        slow, a rank of the other. Where any rank reports the time of its own work, intervals between reports
        are not compared.
        """
        listed = [(node, one) for node, ranks in paces.items() for one in ranks]
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
        turn = self._turns.setdefault(pace.rank, _Turn(now, pace.step))
        if now - turn.at < self._window or pace.step - turn.step < STEPS:
            return False
        del self._turns[pace.rank]
        if before is not None and is_one:
            found = replace(before, seconds=pace.seconds, median=middle, until=max(clock, before.since))
        else:
            since = max(clock - (now - turn.at), 0.0)
            found = Straggler(pace.rank, node, pace.seconds, middle, turn.step, since, pace.own)
        self.known[pace.rank] = found
        return True

    def all(self) -> tuple[Straggler, ...]:
        """Return all that are known, by rank; of more than can be kept, the slow ones first."""
        order = sorted(self.known.values(), key=lambda one: (one.until is not None, -one.ratio))
        return tuple(sorted(order[:MAX_STRAGGLERS], key=lambda one: one.rank))


class StragglerWatch:
    """The watch over one attempt of a job, on one node."""

    def __init__(
        self,
        node: int,
        folder: Path,
        window: float,
        send: Callable[[Message], None],
        noted: Callable[[], None],
    ) -> None:
        """`window`: seconds for which a rank has to stay slow; 0 where nobody wants to know. `noted` is
        called after each note in the logs."""
        self._node, self._folder, self._send, self._noted = node, folder, send, noted
        self._window = window
        self._reports = Reports(folder, window)
        self._paces: dict[int, tuple[Pace, ...]] = {}
        self._looked_at = float("-inf")
        self._detector = Detector(window, job_record.stragglers_of(folder))

    def paces(self) -> tuple[Pace, ...]:
        """Return the pace of this node's ranks."""
        return self._reports.paces() if self._window > 0 else ()

    def heard(self, node: int, paces: tuple[Pace, ...]) -> None:
        self._paces[node] = paces

    def compare(self) -> None:
        """Find ranks that are slow, or have caught up. Called on the first node."""
        now = time.monotonic()
        if self._window <= 0 or now - self._looked_at < self._reports.pause:
            return
        self._looked_at = now
        self._paces[self._node] = self.paces()
        if self._detector.look(self._paces, now, time.time()):
            self.keep(self._detector.all())
            self._send(Message(Kind.STRAGGLERS, stragglers=self._detector.all()))

    def keep(self, known: tuple[Straggler, ...]) -> None:
        """Keep the stragglers with the job, and note what is new about the ranks of this node."""
        before = {one.rank: one for one in job_record.stragglers_of(self._folder)}
        job_record.keep_stragglers(self._folder, known)
        for one in known:
            if one.node == self._node and one != before.get(one.rank):
                _note(self._folder, one)
                self._noted()


def _note(folder: Path, one: Straggler) -> None:
    text = f"straggler: {one.text} since step {one.step}"
    if one.until is not None:
        pace = f"{one.seconds:.3g} s per step, median {one.median:.3g} s"
        text = f"straggler: rank {one.rank} has caught up ({pace})"
    job_record.note_in(folder / "ranks" / f"{one.rank}.log", text)
