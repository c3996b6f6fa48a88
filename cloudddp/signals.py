"""The one policy for Ctrl-C (SIGINT), Ctrl-\\ (SIGQUIT), SIGTERM and SIGHUP.

| phase | first signal | further signals |
|---|---|---|
| `arm()`: normal work | raises | dropped, until the next `arm()` |
| `interruptible()`: work that is followed by a teardown | raises | dropped, also after the block |
| `whole()`: one line of output | raises after it, or after 1 s | dropped |
| `deferred()`: a call to AWS that creates something | a notice; raises after the call | dropped |
| `protected()`: a teardown, the cancelling of a job | a notice; dropped | dropped |
| `ignore()`: the work is done, nothing can be undone | dropped | dropped |

Signals often come in pairs (Ctrl-C, then the window is closed). If the second one raised as well, it would
raise in the first lines of the teardown that the first one began. A signal that was ignored when the process
started (nohup, a background job of a shell) stays ignored in every phase. Python runs handlers in the main
thread only, so in other threads `deferred` and `protected` do nothing. The simulator's server and its nodes
are processes of their own, with handlers of their own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Notice = Callable[[], None]


class Terminated(KeyboardInterrupt):
    """SIGTERM. Like Ctrl-C, but without a user who could be asked."""


class HungUp(Terminated):
    """SIGHUP: the terminal was closed."""


BLOCKED = 1.0  # seconds after which a signal interrupts a line that cannot be written: nobody reads the pipe

EXCEPTIONS = {
    signal.SIGINT: KeyboardInterrupt,
    # without this, a user who finds Ctrl-C slow leaves nodes behind without a word
    signal.SIGQUIT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: HungUp,
}


def arm() -> None:
    """Let the next signal raise KeyboardInterrupt, Terminated or HungUp."""
    _handle(_raise)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let one signal interrupt the block, and none what follows it, so that a teardown after it always
    begins.

    From the end of the block on signals are dropped, until the next `arm()`.
    """
    arm()
    try:
        yield
    finally:
        _handle(_drop)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Raise for a signal after the block, as `arm()` has asked: output and the record of it belong together.

    It is cheap, for each line of a log; a block that does not end is interrupted after BLOCKED seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Block.entered = True
    try:
        yield
    finally:
        _Block.entered = False
        if number := _Block.received:
            _raise_now(number)


class _Block:
    """The block of `whole` in the main thread, and the signal that it has received."""

    entered = False
    received = 0


def ignore() -> None:
    """Ignore signals from now on."""
    _handle(signal.SIG_IGN)


def protected(notice: Notice) -> contextlib.AbstractContextManager[None]:
    """Keep signals from interrupting the block: a teardown takes a minute, skipping it costs dollars an hour.

    `notice` is called at the first signal, from the signal handler.
    """
    return _handled(_notify_once(notice))


@contextlib.contextmanager
def deferred(notice: Notice) -> Iterator[None]:
    """Deliver a signal that comes during the block after it.

    After an interrupt in the middle of RunInstances, it would be unknown what was created. `notice` is called
    at the first signal, from the signal handler.
    """
    received: list[int] = []
    notify = _notify_once(notice)

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        notify(number, frame)

    try:
        with _handled(handler):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


def _raise(number: int, _: FrameType | None) -> None:
    _handle(_drop)
    if not _Block.entered:
        raise EXCEPTIONS[signal.Signals(number)]
    _Block.received = number
    signal.signal(signal.SIGALRM, lambda *_: _raise_now(number))
    signal.setitimer(signal.ITIMER_REAL, BLOCKED)


def _raise_now(number: int) -> None:
    """Raise for a signal that a block of `whole` has received."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    _Block.received = 0
    raise EXCEPTIONS[signal.Signals(number)]


def _drop(_: int, __: FrameType | None) -> None:
    """An earlier signal was raised and is being handled, or the work that it could interrupt is done."""


def _notify_once(notice: Notice) -> Callable[[int, FrameType | None], None]:
    pending = [notice]

    def handler(_: int, __: FrameType | None) -> None:
        if pending:
            pending.pop()()

    return handler


def _handle(handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler for every signal that is not ignored; return the handlers it replaces."""
    numbers = [number for number in EXCEPTIONS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


@contextlib.contextmanager
def _handled(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle(handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
