"""What goes over a command's channel, and for how long each wait on it may last.

It must not know commands or nodes.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko

CHUNK = 128 * 1024  # larger writes were slower (0.82 s against 1.30 s for 200 MB)


class Background:
    """A daemon thread that keeps what went wrong: never joined without a limit, so Ctrl-C is not held up."""

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
def at_most(seconds: float, channel: paramiko.Channel) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer than `seconds`; the channel is closed then, which ends its waits."""
    decided = threading.Lock()  # taken by whichever comes first: the end of the body or of the time

    def close() -> None:
        if not decided.acquire(blocking=False):
            return
        try:
            channel.close()
        except Exception:  # noqa: S110  the connection is over, or a key exchange is
            pass
        finally:
            channel.event.set()  # a channel that was closed already wakes nobody up

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


class Signs:
    """When a command was last seen to be alive: it took or gave a byte. It may be alive for `total` seconds at most."""

    def __init__(self, patience: float | None, total: float | None) -> None:
        self.patience = patience
        self._total = total
        self._began = self.last = time.monotonic()

    def seen(self) -> None:
        """Note a sign of life. Raises TimeoutError where there have been signs for too long, and no end."""
        self.last = time.monotonic()
        if self._late:
            raise TimeoutError

    @property
    def none(self) -> bool:
        return self._late or (self.patience is not None and time.monotonic() - self.last >= self.patience)

    @property
    def _late(self) -> bool:
        return self._total is not None and time.monotonic() - self._began > self._total

    def left(self, seconds: float) -> float:
        """So many seconds, or as many as are left of all."""
        if self._total is None:
            return seconds
        return max(0.0, min(seconds, self._total - (time.monotonic() - self._began)))

    def verdict(self, patience: float | None = None) -> str:
        """What was awaited in vain; `patience` as the constructor's, where that is None."""
        if self._late:
            return f"no end of its answer after {self._total:g} s"
        return f"no answer for {self.patience if patience is None else patience:g} s"


def feed(channel: paramiko.Channel, stdin: bytes | Iterable[bytes], signs: Signs) -> None:
    pieces = [stdin] if isinstance(stdin, bytes) else stdin
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                channel.sendall(piece[start : start + CHUNK])
                signs.seen()
        channel.shutdown_write()
    except OSError as error:
        if error.errno in (None, errno.EPIPE) or isinstance(error, TimeoutError):
            return  # the command ended without reading all: its exit code says more
        raise


def drain(receive: Callable[[int], bytes], keep: Callable[[bytes], Any], signs: Signs) -> None:
    """Receive to the end. Silence on one stream is no sign of death while another one moves."""
    while True:
        try:
            data = receive(CHUNK)
        except TimeoutError:
            if signs.none:
                raise
            continue
        if not data:
            return
        signs.seen()
        keep(data)
