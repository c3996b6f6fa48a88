"""One command's channel: its input and output without waiting, and its time limits. Independent of nodes."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cloudddp.ssh.event_loop import event_loop

if TYPE_CHECKING:
    import paramiko

CHUNK = 128 * 1024  # bytes per read
TURN = 1 << 20  # bytes in each direction, after which other commands of the same thread have their turn
BACKLOG = 1 << 20  # bytes that wait for the network before no more input is read
POLL = 0.02  # seconds: how often an input that had nothing is asked again
LONGEST_WAIT = 0.5  # seconds until time limits are looked at again


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

    # In a thread, since closing a jump host's channel may wait.
    timer = event_loop().call_later(seconds, threading.Thread(target=close, daemon=True).start)
    try:
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

    def begin(self, silence: float | None, total: float | None) -> None:
        """Set new limits, which count from now on."""
        self._total = None
        self._began = self.last = time.monotonic()
        self.silence, self._total = silence, total

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


@runtime_checkable
class WakingInput(Protocol):
    """An input that, after it yielded b"", calls `wake` when it has more; while it `is_starved` it does not, and is asked
    again."""

    def attach(self, wake: Callable[[], None]) -> None: ...

    @property
    def is_starved(self) -> bool: ...


class CommandIO:
    """The input and output of a command that runs. A thread calls `advance` until it returns ENDED, and waits in between as
    `patience` says or until `wake` is called, by another thread.

    The input may be a stream of pieces: it is read as the command takes it, and b"" means that there is nothing yet.
    """

    ENDED, MOVED, WAITING = range(3)

    def __init__(
        self,
        channel: paramiko.Channel,
        stdin: bytes | Iterable[bytes],
        activity: Activity,
        keep: tuple[Callable[[bytes], object], Callable[[bytes], object]],
        wake: Callable[[], None],
    ) -> None:
        self.channel = channel
        self._activity = activity
        self._input = iter((stdin,) if isinstance(stdin, bytes) else stdin)
        self._has_input, self._piece, self._at = True, b"", 0
        self._is_starved = False
        self._waking = stdin if isinstance(stdin, WakingInput) else None
        if self._waking is not None:
            self._waking.attach(wake)
        self._wake = wake
        self._streams = (
            (channel.recv_ready, channel.recv, keep[0]),
            (channel.recv_stderr_ready, channel.recv_stderr, keep[1]),
        )
        self._transport: Any = channel.transport
        _wake_on_changes(channel, wake)

    @property
    def patience(self) -> float:
        """Return how many seconds may pass until the next call of `advance`."""
        return POLL if self._is_starved or not self._transport.clear_to_send.is_set() else LONGEST_WAIT

    def advance(self) -> int:
        """Send and receive what is possible at once. Raises TimeoutError when a time limit has passed; what the input and the
        receivers of the output raise; and paramiko's errors."""
        if self._receive() | self._send():
            self._activity.record()
            return self.MOVED
        if self._has_ended:
            return self.ENDED
        if not self._may_send:
            # The transport limits how long an exchange of keys may take.
            self._activity.last = time.monotonic()
        if self._activity.timed_out:
            raise TimeoutError
        return self.WAITING

    @property
    def _has_ended(self) -> bool:
        channel = self.channel
        return bool(
            (channel.eof_received or channel.closed)
            and channel.status_event.is_set()
            and not (channel.recv_ready() or channel.recv_stderr_ready())
        )

    @property
    def _may_send(self) -> bool:
        """Whether no keys are exchanged, during which sending would wait. An exchange may begin at any time."""
        return bool(self._transport.clear_to_send.is_set() or not self._transport.is_active())

    def _receive(self) -> bool:
        received = 0
        for is_ready, receive, keep in self._streams:
            end = received + TURN
            # Reading enlarges the server's window, which is a message.
            while received < end and (self._may_send or self._transport.sends_at_once) and is_ready():
                data = receive(CHUNK)
                received += len(data)
                keep(data)
        return received > 0

    def _send(self) -> bool:
        sent = 0
        self._is_starved = False
        while self._has_input and sent < TURN and self._may_send and self.channel.out_window_size > 0:
            if getattr(self._transport.sock, "backlog", 0) > BACKLOG:
                self._transport.sock.when_sent(self._wake)
                break
            if self._at == len(self._piece):
                piece = next(self._input, None)
                if piece is None:
                    self._has_input = False
                    self._end_input()
                    return True
                self._piece, self._at = piece, 0
                if not piece:
                    self._is_starved = self._waking is None or self._waking.is_starved
                    break
            count = self._send_piece()
            if not count:
                self._has_input = False  # the command has ended, and its exit code is reported
            sent += count
        return sent > 0

    def _send_piece(self) -> int:
        # As paramiko does: room for the header. A server may announce that it takes packets of any size.
        most = min(self.channel.out_max_packet_size - 64, CHUNK)
        try:
            count = int(self.channel.send(self._piece[self._at : self._at + most]))
        except OSError as error:
            if error.errno in (None, errno.EPIPE):
                return 0
            raise
        self._at += count
        return count

    def _end_input(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.shutdown_write()


def _wake_on_changes(channel: paramiko.Channel, wake: Callable[[], None]) -> None:
    """Call `wake` when a channel has output, accepts input, or ends: paramiko offers an event for each of these."""

    class Flag:
        """What BufferedPipe.set_event needs."""

        def set(self) -> None:
            wake()

        def clear(self) -> None:
            pass

    class Window(threading.Condition):
        def notify_all(self) -> None:
            super().notify_all()
            wake()

    class Status(threading.Event):
        def set(self) -> None:
            super().set()
            wake()

    with channel.lock:
        channel.out_buffer_cv = Window(channel.lock)
        status = Status()
        if channel.status_event.is_set():
            status.set()
        channel.status_event = status
    for buffer in (channel.in_buffer, channel.in_stderr_buffer):
        buffer.set_event(Flag())
