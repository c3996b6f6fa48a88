"""When the parts of a start were reached, for `--timings`: in memory that the step `start` shares with the processes it forks."""

from __future__ import annotations

import mmap
import struct
import time
from typing import Optional

NAMES = ("step", "supervisor", "mesh", "preflight")
_TIME = struct.Struct("d")
_page: Optional[mmap.mmap] = None


def begin() -> None:
    """Share what is marked from now on with the processes that this one forks."""
    global _page
    _page = mmap.mmap(-1, mmap.PAGESIZE)
    mark("step")


def mark(name: str) -> None:
    """Note that this part has been reached, unless it was before. Processes without `begin` note nothing."""
    place = NAMES.index(name) * _TIME.size
    if _page is not None and _TIME.unpack_from(_page, place) == (0.0,):
        _TIME.pack_into(_page, place, time.monotonic())


def seconds_ago() -> dict[str, float]:
    """Return how many seconds ago each part was reached."""
    if _page is None:
        return {}
    now = time.monotonic()
    found = {name: _TIME.unpack_from(_page, k * _TIME.size)[0] for k, name in enumerate(NAMES)}
    return {name: max(now - at, 0.0) for name, at in found.items() if at}
