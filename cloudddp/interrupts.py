"""Ctrl-C, SIGTERM and SIGHUP: each becomes an exception once, and what follows is held off until somebody re-arms.

Two signals often come together (Ctrl-C, then the window is closed). If the second raised too, it would raise in the
first lines of the very teardown that the first one has begun.
"""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C, but nobody is there to be asked."""


class HungUp(Terminated):
    """SIGHUP: the terminal went away."""


ERRORS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}


def arm() -> None:
    """Let the next signal raise. One that is ignored from outside (nohup, a background job) stays ignored."""
    for number in ERRORS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise_once)


def _raise_once(number: int, _: FrameType | None) -> None:
    for each in ERRORS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _held)
    raise ERRORS[signal.Signals(number)]


def _held(_: int, __: FrameType | None) -> None:
    """One was raised already, and is being dealt with."""
