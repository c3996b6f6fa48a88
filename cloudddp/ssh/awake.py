"""A clock for time limits on other machines: it stands still while this process does not run."""

from __future__ import annotations

import threading
import time

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
