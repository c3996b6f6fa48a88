"""A command that runs on a node: its input and output over a channel of an authenticated connection, and its
result."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudddp.config.timing import Timing
from cloudddp.errors import ConnectionLost, NodeError
from cloudddp.ssh import login_shell
from cloudddp.ssh.time_limits import Activity, Overdue
from cloudddp.text import one_line

if TYPE_CHECKING:
    import paramiko

MAX_OUTPUT = 4 << 20  # bytes of a command's output that are kept by default
MAX_PACKET = 128 << 10  # bytes that a server may put into one packet; paramiko's default is 32 KiB
CHUNK = 128 * 1024  # bytes per read
TURN = 1 << 20  # bytes in one direction, after which it is the other one's turn
POLL = 0.02  # seconds: how often an input that had nothing is asked again
# Seconds until a server that accepted no more input is asked again: sshd accepts 2 MiB ahead, so this allows
# 400 MB/s.
WINDOW_POLL = 0.005
LONGEST_WAIT = 0.5  # seconds until time limits are looked at again

Receivers = tuple[Callable[[bytes], object], Callable[[bytes], object]]
"""What gets stdout and stderr."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command. Output is bytes: a node's text need not be UTF-8."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command to run, its input and its limits.

    `stdin` may be a stream of pieces, which is sent while output is read. b"" means that there is nothing to
    send yet: it is asked again a moment later. With `on_stdout` the output is passed on as it arrives and
    Result.stdout is empty; `on_stderr` likewise. Otherwise at most `limit` bytes of each stream are kept: a
    command that writes more is ended, with NodeError.

    `command_timeout` is the longest time, in seconds, in which the command neither sends nor accepts a byte;
    None sets no limit once the server has started it (keepalives still find a dead node). `total_timeout`
    limits the whole command: a node that sends a byte now and then would otherwise never time out.

    `until_exit`: it ends with its own process, also if one that it left in the background still holds its
    output open.
    """

    command: str
    stdin: bytes | Iterable[bytes] = b""
    command_timeout: float | None = 60.0
    on_stdout: Callable[[bytes], None] | None = None
    on_stderr: Callable[[bytes], None] | None = None
    limit: int = MAX_OUTPUT
    total_timeout: float | None = None
    until_exit: bool = False


class Input:
    """What is left to be sent to a command."""

    def __init__(self, pieces: bytes | Iterable[bytes]) -> None:
        if isinstance(pieces, bytes):
            pieces = (pieces,) if pieces else ()
        self._pieces = iter(pieces)
        self._piece, self._at = b"", 0
        self.is_open = True
        self.is_starved = False  # it has nothing to send yet

    def peek(self, size: int) -> bytes | None:
        """Return up to so many bytes that are due, b"" if there is nothing to send yet, None at the end."""
        self.is_starved = False
        if self._at == len(self._piece):
            piece = next(self._pieces, None)
            self.is_open, self.is_starved = piece is not None, piece == b""
            self._piece, self._at = piece or b"", 0
        return self._piece[self._at : self._at + size] if self.is_open else None

    def skip(self, size: int) -> None:
        """Note that so many bytes were sent."""
        self._at += size

    def end(self) -> None:
        """Send no more."""
        self.is_open = False

    @property
    def is_sent(self) -> bool:
        """Whether all of it was sent. Asks for the next piece."""
        return not self.is_open or self.peek(1) is None


class RunningCommand:
    """A command that a node runs. Only one thread at a time may use it."""

    def __init__(
        self,
        label: str,
        transport: paramiko.Transport | None,
        command: str,
        activity: Activity,
        limits: Timing,
        *,
        window: int,
        until_exit: bool = False,
    ) -> None:
        """Start it. `window`: how many bytes of its output may be in memory. Raises NodeError."""
        self._label, self._transport, self._command, self._limits = label, transport, command, limits
        self._marker = login_shell.Marker(at_exit=until_exit)
        stdout, stderr = (login_shell.Output(label, self._marker) for _ in range(2))
        self._outputs = stdout, stderr
        self._changed = threading.Event()  # the channel has output, or has ended
        self._channel = self._start(activity, window)

    def _start(self, activity: Activity, window: int) -> paramiko.Channel:
        silence = self._limits.start if activity.silence is None else activity.silence
        limit, began = activity.left(silence), time.monotonic()
        transport, channel, timer = self._transport, None, None
        try:
            if transport is None or not transport.is_active():
                raise self._reason_of_end or EOFError
            channel = transport.open_session(window, MAX_PACKET, timeout=limit)
            for buffer in (channel.in_buffer, channel.in_stderr_buffer):
                buffer.set_event(self._changed)
            # paramiko has no limit for the reply.
            timer = threading.Timer(max(0.0, began + limit - time.monotonic()), self._close, (channel,))
            timer.daemon = True
            timer.start()
            text = self._marker.command(self._command)
            channel.exec_command(text.encode("utf-8", "surrogateescape"))  # a path need not be UTF-8
            activity.record()
            return channel
        except BaseException as error:
            if channel is not None:
                self._close(channel)
            is_late = time.monotonic() - began >= limit and transport is not None and transport.is_active()
            if is_late or isinstance(error, Overdue):
                raise self._timed_out(activity.reason(silence)) from None
            if isinstance(error, Exception):  # of any type, if a packet was invalid
                raise self._broken(error) from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def exchange(
        self,
        source: Input,
        receivers: Receivers,
        activity: Activity,
        *,
        until: Callable[[], bool] = lambda: False,
        keep_open: bool = False,
    ) -> int | None:
        """Send input and pass on output, until the command has ended: return its exit code; or until `until`
        is true after some output: return None. `keep_open`: more input may follow.

        Raises NodeError if the connection breaks or a time limit passes, and what input and receivers raise.
        """
        import paramiko

        try:
            while True:
                self._changed.clear()
                has_received = self._receive(receivers)
                if has_received and until():
                    return None
                if self._has_ended:
                    return self._finish(receivers)
                if self._send(source, keep_open=keep_open) or has_received:
                    activity.record()
                    continue
                blocked = WINDOW_POLL if source.is_open else LONGEST_WAIT
                self._changed.wait(POLL if source.is_starved else blocked)
                if not self._is_readable:  # the input may have taken its time
                    activity.check()
        except Overdue:
            raise self._timed_out(activity.reason()) from None
        except (paramiko.SSHException, EOFError) as error:  # an OSError comes from the input or a receiver
            raise self._broken(error) from None

    @property
    def is_quiet(self) -> bool:
        """Whether it runs, and has written nothing that was not passed on."""
        return not (self._channel.closed or self._channel.eof_received or self._is_readable)

    def close(self) -> None:
        """Close its channel: a command that still runs gets no more input, and its output is lost."""
        self._close(self._channel)

    def _close(self, channel: paramiko.Channel) -> None:
        import paramiko

        def close() -> None:
            # On a broken connection: an error here would take the place of the one that the user needs.
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.close()

        if self._transport is None or self._transport.clear_to_send.is_set():
            close()
        else:  # paramiko waits for the end of the key exchange, to which there may be none
            threading.Thread(target=close, daemon=True).start()

    # -- the channel -----------------------------------------------------------------------------------------

    def _receive(self, receivers: Receivers) -> bool:
        channel, received = self._channel, 0
        streams = (
            (channel.recv_ready, channel.recv),
            (channel.recv_stderr_ready, channel.recv_stderr),
        )
        for (is_ready, receive), output, pass_on in zip(streams, self._outputs, receivers, strict=True):
            end = received + TURN
            while received < end and is_ready():
                data = receive(CHUNK)
                received += len(data)
                if own := output.feed(data):
                    pass_on(own)
        return received > 0

    def _send(self, source: Input, *, keep_open: bool) -> bool:
        sent = 0
        while source.is_open and sent < TURN and self._channel.out_window_size > 0:
            # As paramiko does: room for the header.
            piece = source.peek(min(self._channel.out_max_packet_size - 64, CHUNK))
            if piece is None and not keep_open:
                with contextlib.suppress(OSError):
                    self._channel.shutdown_write()
            if not piece:
                break
            count = self._send_piece(piece)
            source.skip(count)
            sent += count
            if not count:
                source.end()  # the command has ended, and its exit code is reported
        return sent > 0

    def _send_piece(self, piece: bytes) -> int:
        """Return how many bytes were sent, 0 if the command takes none any more."""
        try:
            return int(self._channel.send(piece))
        except OSError as error:
            if error.errno in (None, errno.EPIPE):
                return 0
            raise

    @property
    def _is_readable(self) -> bool:
        return bool(self._channel.recv_ready() or self._channel.recv_stderr_ready())

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended, and nothing is left to receive."""
        channel = self._channel
        return self._own_exit_code is not None or bool(
            (channel.closed or (channel.eof_received and channel.status_event.is_set()))
            and not self._is_readable
        )

    # -- its end ---------------------------------------------------------------------------------------------

    def _finish(self, receivers: Receivers) -> int:
        """Return the exit code. Raises NodeError if it is the connection that has ended, or the shell before
        the command."""
        stdout, _ = self._outputs
        exit_code = self._channel.exit_status if self._own_exit_code is None else self._own_exit_code
        if exit_code == -1:  # no exit status: killed by a signal, or the connection is gone
            transport = self._transport
            if transport is not None:  # it closes its channels first, and becomes inactive a moment later
                transport.join(0.2)
            if transport is None or not transport.is_active():
                raise self._broken(self._reason_of_end)
            exit_code = 255
        if not stdout.has_begun:
            raise login_shell.ended_early(self._label, exit_code, self._outputs)
        login_shell.record(self._label, stdout)
        for output, pass_on in zip(self._outputs, receivers, strict=True):
            if rest := output.rest():
                pass_on(rest)
        return int(exit_code)

    @property
    def _own_exit_code(self) -> int | None:
        """The command's own exit code, once its output is complete on both streams."""
        codes = [output.exit_code for output in self._outputs]
        return None if None in codes else codes[0]

    @property
    def _reason_of_end(self) -> Exception | None:
        """Why paramiko has ended the connection, None if it was closed."""
        error = None if self._transport is None else self._transport.saved_exception
        return None if isinstance(error, (OSError, EOFError)) else error

    def _timed_out(self, limit: str) -> ConnectionLost:
        return ConnectionLost(
            f"{self._label}: {limit}",
            f" to: {short(self._command)}",
            hint="is the node alive? `cloudddp status` shows its state; try `cloudddp exec -- uptime`",
        )

    def _broken(self, error: Exception | None) -> ConnectionLost:
        import paramiko

        if error is None or isinstance(error, (OSError, EOFError, paramiko.SSHException)):
            # paramiko quotes what the node has sent.
            cause = one_line(str(error or ""), 200) or "connection closed"
        else:
            cause = f"it sent an invalid packet ({type(error).__name__})"
        return ConnectionLost(
            f"{self._label}: the SSH connection broke ({cause})",
            f" in: {short(self._command)}",
            hint="`cloudddp status` shows whether the node still exists",
        )


class BoundedBuffer:
    """Keeps what a command writes to one stream, up to a limit in bytes."""

    def __init__(self, label: str, limit: int) -> None:
        self.data = bytearray()
        self._label, self._limit = label, limit

    def add(self, data: bytes) -> None:
        if len(self.data) + len(data) > self._limit:
            raise NodeError(
                f"{self._label}: its answer is longer than {self._limit >> 20} MiB and was cut off"
            )
        self.data += data


def short(command: str) -> str:
    """Return the first line of a command, shortened."""
    line = command.strip().splitlines()[0] if command.strip() else ""
    return line if len(line) <= 100 else line[:97] + "..."
