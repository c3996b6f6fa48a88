"""Input and output of one command's channel, and a time limit for each wait. Independent of commands and nodes."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko

CHUNK = 128 * 1024  # bytes per write; larger ones were slower (0.82 s against 1.30 s for 200 MB)


class Background:
    """A daemon thread that keeps its error. It is only joined with a timeout, so that it never delays Ctrl-C."""

    def __init__(self, work: Callable[[], None], *, on_error: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            self._on_error()

    def join(self, timeout: float | None) -> None:
        self._thread.join(timeout)


@contextlib.contextmanager
def time_limit(seconds: float, channel: paramiko.Channel) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer than `seconds`; closing the channel then ends the body's waits."""
    decided = threading.Lock()  # taken by whichever comes first: the end of the body, or the timeout

    def close() -> None:
        if not decided.acquire(blocking=False):
            return
        try:
            channel.close()
        except Exception:  # noqa: S110  the connection has ended, or a key exchange is in progress
            pass
        finally:
            channel.event.set()  # a channel that was already closed wakes no waiting thread

    timer = threading.Timer(seconds, close)
    timer.daemon = True
    try:
        timer.start()
        yield
    except Exception:
        if decided.acquire(blocking=False):
            raise
        raise TimeoutError from None
    else:
        if not decided.acquire(blocking=False):
            raise TimeoutError
    finally:
        timer.cancel()


class Activity:
    """When a command last sent or accepted a byte, and the time limits that follow from it.

    `silence` is how long it may do neither, `total` how long it may take at all, in seconds; None is no limit.
    """

    def __init__(self, silence: float | None, total: float | None) -> None:
        self.silence = silence
        self._total = total
        self._began = self.last = time.monotonic()

    def record(self) -> None:
        """Note that a byte has moved. Raises TimeoutError if the total time is over."""
        self.last = time.monotonic()
        if self._over:
            raise TimeoutError

    @property
    def timed_out(self) -> bool:
        return self._over or (self.silence is not None and time.monotonic() - self.last >= self.silence)

    @property
    def _over(self) -> bool:
        return self._total is not None and time.monotonic() - self._began > self._total

    def left(self, seconds: float) -> float:
        """Return `seconds`, or the rest of the total time if that is less."""
        if self._total is None:
            return seconds
        return max(0.0, min(seconds, self._total - (time.monotonic() - self._began)))

    def reason(self, silence: float | None = None) -> str:
        """Return which limit has passed; `silence` overrides the constructor's."""
        if self._over:
            return f"its answer did not end within {self._total:g} s"
        return f"no answer for {self.silence if silence is None else silence:g} s"


def feed(channel: paramiko.Channel, stdin: bytes | Iterable[bytes], activity: Activity) -> None:
    """Send the input and its end. A command that ends without reading all of it is not an error."""
    pieces = [stdin] if isinstance(stdin, bytes) else stdin
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                channel.sendall(piece[start : start + CHUNK])
                activity.record()
        channel.shutdown_write()
    except OSError as error:
        if error.errno in (None, errno.EPIPE) or isinstance(error, TimeoutError):
            return  # the command has ended, and its exit code is reported
        raise


def drain(receive: Callable[[int], bytes], keep: Callable[[bytes], Any], activity: Activity) -> None:
    """Receive one stream to its end. Silence on one stream is not a timeout while data arrives on the other."""
    while True:
        try:
            data = receive(CHUNK)
        except TimeoutError:
            if activity.timed_out:
                raise
            continue
        if not data:
            return
        activity.record()
        keep(data)
