"""How a guard knows that its supervisor still runs its loop: one that is stopped, or waits for a disk that never answers, holds
its ranks and ends nothing. The other nodes notice that by its heartbeats; this is for its own node."""

from __future__ import annotations

import mmap
import struct
import time

_FORMAT = "d"


class Pulse:
    """Memory that a supervisor shares with its guard: until when it is sure to be heard of again, by the monotonic clock."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, struct.calcsize(_FORMAT))
        self.beat(float("inf"))  # until the first beat

    def beat(self, seconds: float) -> None:
        """The process runs its loop, and will again within `seconds`."""
        struct.pack_into(_FORMAT, self._page, 0, time.monotonic() + seconds)

    @property
    def until(self) -> float:
        return float(struct.unpack_from(_FORMAT, self._page)[0])
