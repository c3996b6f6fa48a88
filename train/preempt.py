"""The wish to stop: SIGTERM, as a spot notice, a scheduler or `cloudddp cancel` sends it; and Ctrl-C, which is SIGINT.

It must not know ranks, snapshots or torch. The handler of SIGTERM only sets a flag: what runs inside a signal handler
may interrupt a collective operation, so the training loop asks at its own places.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


class StopSignal:
    """Whether this process was told to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def listen() -> Iterator[StopSignal]:
    """Take SIGTERM as a wish, and SIGINT as a KeyboardInterrupt, for the length of a `with` block. Outside the main
    thread nothing is listened to.

    Once told to stop, or when an exception ends the block, the process takes any further SIGTERM as the same wish to
    its end.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop)
    quiet = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield stop
    finally:
        if quiet:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Launchers repeat themselves: a second SIGTERM must not cut short the clean end that the first one asked for. And
    # torchrun sends one to every rank as soon as one has ended: the others may be about to say why they end.
    if not stop.asked:
        signal.signal(signal.SIGTERM, before)


def end_quietly() -> None:
    """Have SIGINT end this process without a word, but while it listens. A process that ignores it still does.

    While torch is imported nothing can be lost, and a KeyboardInterrupt would be a traceback from anywhere in there; a
    process that waits for the others in C++ would not see one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Processes started in here do not see these signals until they let them through; this one sees them afterwards."""
    resource_tracker.ensure_running()  # its start would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
