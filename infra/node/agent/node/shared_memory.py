"""Memory that a process shares with those that it forks: a guard and its supervisor, the step `start` and
what it starts."""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
import traceback
from typing import Optional

from cloudddp.agent.protocol.jobs import MAX_LINE

_TEXT = 4 * MAX_LINE  # bytes of that many characters
_TIME = struct.Struct("d")


class SharedText:
    """The error of a supervisor that has crashed, for its guard: a full disk takes no log."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _TEXT)

    def keep(self, error: BaseException) -> None:
        """Keep what a traceback says last, and write the traceback into the log of this process."""
        data = last_line(error).encode(errors="replace")
        self._page[: len(data)] = data
        with contextlib.suppress(OSError):
            traceback.print_exception(type(error), error, error.__traceback__)

    @property
    def text(self) -> str:
        return self._page[:].rstrip(b"\0").decode(errors="replace")


def last_line(error: BaseException) -> str:
    """Return what a traceback says last, such as `OSError: [Errno 28] No space left on device`."""
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    return lines[-1][:MAX_LINE] if lines else ""


class SupervisorHeartbeat:
    """How a guard knows that its supervisor still runs its loop: one that is stopped, or waits for a disk
    that never answers, holds its ranks and ends nothing. Other nodes notice that by its messages; this is for
    its own node."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _TIME.size)
        self.beat(float("inf"))  # until the first beat

    def beat(self, seconds: float) -> None:
        """The process runs its loop, and will again within `seconds`."""
        _TIME.pack_into(self._page, 0, time.monotonic() + seconds)

    @property
    def until(self) -> float:
        """Until when the supervisor is sure to be heard of again, by the monotonic clock."""
        return float(_TIME.unpack_from(self._page)[0])


# -- when the parts of a start were reached, for `--timings` -------------------------------------------------

START_PARTS = ("step", "supervisor", "mesh", "preflight")
_start_times: Optional[mmap.mmap] = None


def begin_start() -> None:
    """Share what is marked from now on with the processes that this one forks."""
    global _start_times
    _start_times = mmap.mmap(-1, mmap.PAGESIZE)
    mark_start("step")


def mark_start(part: str) -> None:
    """Note that this part has been reached, unless it was before. Processes without `begin_start` note
    nothing."""
    place = START_PARTS.index(part) * _TIME.size
    if _start_times is not None and _TIME.unpack_from(_start_times, place) == (0.0,):
        _TIME.pack_into(_start_times, place, time.monotonic())


def start_seconds_ago() -> dict[str, float]:
    """Return how many seconds ago each part was reached."""
    if _start_times is None:
        return {}
    now = time.monotonic()
    found = {part: _TIME.unpack_from(_start_times, k * _TIME.size)[0] for k, part in enumerate(START_PARTS)}
    return {part: max(now - at, 0.0) for part, at in found.items() if at}
