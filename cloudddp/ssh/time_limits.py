"""Time limits of what runs on other machines: how long a command may be silent and how long it may take,
and a clock that stands still while this process does not run. Independent of SSH."""

from __future__ import annotations

import threading
import time


class Overdue(Exception):
    """A time limit has passed."""


class IdleTimer:
    """When a command last sent or accepted a byte, and the time limits that follow from it.

    `silence` is how long it may do neither, `total` how long it may take at all, in seconds; None is no
    limit.
    """

    def __init__(self, silence: float | None, total: float | None) -> None:
        self.silence = silence
        self._total = total
        self._began = self._last = time.monotonic()

    def record(self) -> None:
        """Note that a byte has moved. Raises Overdue if the total time is over."""
        self._last = time.monotonic()
        if self._over:
            raise Overdue

    def check(self) -> None:
        """Raise Overdue if a limit has passed."""
        if self._over or (self.silence is not None and time.monotonic() - self._last >= self.silence):
            raise Overdue

    @property
    def _over(self) -> bool:
        return self._total is not None and time.monotonic() - self._began > self._total

    def left(self, seconds: float) -> float:
        """Return `seconds`, or the rest of the total time if that is less."""
        if self._total is None:
            return seconds
        return max(0.0, min(seconds, self._total - (time.monotonic() - self._began)))

    def reason(self, silence: float | None = None) -> str:
        """Return which limit has passed; `silence` overrides the constructor's."""
        if self._over:
            return f"its answer did not end within {self._total:g} s"
        return f"no answer for {self.silence if silence is None else silence:g} s"


GAP = 2.0  # seconds between two looks from which on this process was stopped, or its computer asleep


class AwakeClock:
    """time.monotonic() without the time in which this process was stopped or its computer slept: it could not
    receive anything then. It has to be read several times a second. Any thread may read it."""

    def __init__(self) -> None:
        self.slept = 0.0
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._last > GAP:
                self.slept += now - self._last
            self._last = now
            return now - self.slept
