"""The wish to stop: SIGTERM, as a spot notice, a scheduler or `cloudddp cancel` sends it.

It must not know ranks or snapshots. The handler only sets a flag: what runs inside a signal handler may interrupt a
collective operation, so the training loop asks at its own places.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Whether this process was told to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def listen() -> Iterator[StopSignal]:
    """Take SIGTERM as a wish for the length of a `with` block. Outside the main thread nothing is listened to.

    Once told to stop, or when an exception ends the block, the process takes any further SIGTERM as the same wish to
    its end.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop)
    yield stop
    # Launchers repeat themselves: a second SIGTERM must not cut short the clean end that the first one asked for. And
    # torchrun sends one to every rank as soon as one has ended: the others may be about to say why they end.
    if not stop.asked:
        signal.signal(signal.SIGTERM, before)
