"""How a supervisor that has crashed names its error, for the guard and the other nodes: a full disk takes no log."""

from __future__ import annotations

import contextlib
import mmap
import traceback

from cloudddp.agent.protocol.verdict import MAX_LINE

_SIZE = 4 * MAX_LINE  # bytes of that many characters


class SharedText:
    """A text in memory that a process shares with the children that it forks."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _SIZE)

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
