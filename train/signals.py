"""Handling of stop signals: SIGTERM from a spot notice, a scheduler or `cloudddp cancel`, and SIGINT from
Ctrl-C.

Independent of ranks and torch. The handler of SIGTERM only sets a flag: code in a signal handler could
interrupt a collective operation, so the training loop polls the flag at points of its own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop. An instance is the signal handler."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.received = True


@contextmanager
def handle_stop_signals() -> Iterator[StopRequest]:
    """Record SIGTERM as a stop request and turn SIGINT into KeyboardInterrupt inside the block.

    Does nothing outside the main thread. After a stop request, or when an exception ends the block, further
    SIGTERMs keep being recorded until the process exits.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.signal(signal.SIGTERM, stop)
    silent = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if silent:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield stop
    finally:
        if silent:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Launchers repeat SIGTERM: a second one must not cut short the clean exit that the first one asked for.
    # And torchrun sends one to every rank as soon as one has exited: the others may be about to report why
    # they exit.
    if not stop.received:
        signal.signal(signal.SIGTERM, previous)


def exit_silently_on_sigint() -> None:
    """Let SIGINT end this process without a traceback, except inside `handle_stop_signals`.

    While torch is imported there is nothing to save, and a KeyboardInterrupt would print a traceback from
    inside torch; a process that waits for other ranks in C++ would not see the exception at all. A process
    that ignores SIGINT keeps ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block these signals in the block, and in processes started there until they unblock them."""
    resource_tracker.ensure_running()  # starting it inside the block would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
