"""What a guard must know of its supervisor, in memory that it shares with that fork of itself; and when the
parts of a start were reached."""

from __future__ import annotations

import mmap
import struct
import time
import traceback

from cloudddp.agent.protocol.jobs import MAX_LINE

_TIME = struct.Struct("d")
_TEXT = 4 * MAX_LINE  # bytes of that many characters


class SupervisorHeartbeat:
    """How a guard knows that its supervisor still runs its loop: one that is stopped, or waits for a disk
    that never answers, holds its ranks and ends nothing. Other nodes notice that by its messages; this is for
    its own node. `error`: by which the supervisor has ended; a full disk takes no log."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _TIME.size + _TEXT)
        self.beat(float("inf"))  # until the first beat

    def beat(self, seconds: float) -> None:
        """The process runs its loop, and will again within `seconds`."""
        _TIME.pack_into(self._page, 0, time.monotonic() + seconds)

    @property
    def until(self) -> float:
        """Until when the supervisor is sure to be heard of again, by the monotonic clock."""
        return float(_TIME.unpack_from(self._page)[0])

    def crashed(self, error: BaseException) -> None:
        self._page.seek(_TIME.size)
        self._page.write(last_line(error).encode(errors="replace"))

    @property
    def error(self) -> str:
        return self._page[_TIME.size :].rstrip(b"\0").decode(errors="replace")


def last_line(error: BaseException) -> str:
    """Return what a traceback says last, such as `OSError: [Errno 28] No space left on device`."""
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    return lines[-1][:MAX_LINE] if lines else ""


# For `--timings`: part -> when this process, or one that it is a fork of, reached it, by the monotonic clock.
reached: dict[str, float] = {}


def mark_start(part: str) -> None:
    """Note that a part of the start has been reached, unless it was before."""
    reached.setdefault(part, time.monotonic())
