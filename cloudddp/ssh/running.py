"""A command that runs on a node: its input and output over a channel of an authenticated connection, and its
result."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cloudddp.errors import ConnectionLost, NodeError
from cloudddp.ssh import login_shell
from cloudddp.ssh.time_limits import IdleTimer, Overdue
from cloudddp.text import one_line

if TYPE_CHECKING:
    import paramiko

    from cloudddp.config.timing import Timing
    from cloudddp.ssh.target import Target

MAX_OUTPUT = 4 << 20  # bytes of a command's output that are kept by default
MAX_PACKET = 128 << 10  # bytes that a server may put into one packet; paramiko's default is 32 KiB
SENT_PACKET = 32 << 10  # bytes that sshd takes in one
CHUNK = 128 * 1024  # bytes per read
TURN = 1 << 20  # bytes in one direction, after which it is the other one's turn
# Seconds between two looks at what does not wake its reader: stderr while stdout is open, an input that had
# nothing, a server that accepted no more input. sshd accepts 2 MiB ahead, so 5 ms allow 400 MB/s.
SHORTEST_PAUSE, INPUT_PAUSE, WINDOW_PAUSE, LONGEST_PAUSE = 0.001, 0.02, 0.005, 0.25

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
        self._pieces = iter((pieces,) if isinstance(pieces, bytes) else pieces)
        self._piece, self._at = b"", 0
        self.is_open = pieces != b""
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

    @property
    def is_sent(self) -> bool:
        """Whether all of it was sent. Asks for the next piece."""
        return not self.is_open or self.peek(1) is None


class _Stream:
    """One of the two streams that a command writes."""

    def __init__(self, receive: Callable[[int], bytes], output: login_shell.Output) -> None:
        self.receive, self.output = receive, output
        self.has_ended = False

    def is_ready(self) -> bool:
        """Wait for the channel's timeout, and return whether there is something to read, or its end."""
        try:
            self.receive(0)
        except TimeoutError:
            return False
        return True

    def read(self) -> bytes:
        """Return what has arrived, b"" for nothing."""
        try:
            data = self.receive(CHUNK)
        except TimeoutError:
            return b""
        self.has_ended = not data
        return data


class Authenticated(Protocol):
    """What a command needs of its connection."""

    transport: paramiko.Transport
    target: Target
    limits: Timing

    @property
    def is_open(self) -> bool: ...

    def reason_of_end(self) -> Exception | None: ...


class RunningCommand:
    """A command that a node runs. Only one thread at a time may use it."""

    def __init__(
        self,
        connection: Authenticated,
        command: str,
        marker: login_shell.Marker,
        idle: IdleTimer,
        window: int,
    ) -> None:
        """Start it. `window`: how many bytes of its output may be in memory. Raises NodeError."""
        self._connection, self._command = connection, command
        self._label = connection.target.label
        self._channel = self._start(marker.command(command), idle, window)
        receivers = self._channel.recv, self._channel.recv_stderr
        self._streams = [_Stream(receive, login_shell.Output(self._label, marker)) for receive in receivers]

    def _start(self, text: str, idle: IdleTimer, window: int) -> paramiko.Channel:
        silence = self._connection.limits.start if idle.silence is None else idle.silence
        limit, began = idle.left(silence), time.monotonic()
        channel, timer = None, None
        try:
            channel = self._connection.transport.open_session(window, MAX_PACKET, timeout=limit)
            # paramiko has no limit for the reply.
            timer = threading.Timer(max(0.0, began + limit - time.monotonic()), _close, (channel,))
            timer.daemon = True
            timer.start()
            channel.exec_command(text.encode("utf-8", "surrogateescape"))  # a path need not be UTF-8
            idle.record()
            return channel
        except BaseException as error:
            if channel is not None:
                _close(channel)
            is_late = time.monotonic() - began >= limit and self._connection.is_open
            if is_late or isinstance(error, Overdue):
                raise self._timed_out(idle.reason(silence)) from None
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
        idle: IdleTimer,
        *,
        until: Callable[[], bool] = lambda: False,
        keep_open: bool = False,
    ) -> int | None:
        """Send input and pass on output, until the command has ended: return its exit code; or until `until`
        is true after some output: return None. `keep_open`: more input may follow.

        Raises NodeError if the connection breaks or a time limit passes, and what input and receivers raise.
        """
        import paramiko

        pause = SHORTEST_PAUSE
        try:
            while True:
                has_received = self._receive(receivers)
                if has_received and until():
                    return None
                if self._has_ended:
                    return self._finish(receivers)
                if self._send(source, keep_open=keep_open) or has_received:
                    idle.record()
                    pause = SHORTEST_PAUSE
                    continue
                if not self._wait(pause):  # the input may have taken its time
                    idle.check()
                longest = INPUT_PAUSE if source.is_starved else WINDOW_PAUSE
                pause = min(2 * pause, longest if source.is_open else LONGEST_PAUSE)
        except Overdue:
            raise self._timed_out(idle.reason()) from None
        except (paramiko.SSHException, EOFError) as error:  # an OSError comes from the input or a receiver
            raise self._broken(error) from None

    @property
    def is_quiet(self) -> bool:
        """Whether it runs, and has written nothing that was not passed on."""
        self._channel.settimeout(0.0)
        return not any(stream.is_ready() for stream in self._streams)

    def close(self) -> None:
        """Close its channel: a command that still runs gets no more input, and its output is lost."""
        _close(self._channel)

    # -- the channel -----------------------------------------------------------------------------------------

    def _receive(self, receivers: Receivers) -> bool:
        self._channel.settimeout(0.0)
        received = 0
        for stream, pass_on in zip(self._streams, receivers, strict=True):
            end = received + TURN
            while received < end and (data := stream.read()):
                received += len(data)
                if own := stream.output.feed(data):
                    pass_on(own)
        return received > 0

    def _wait(self, seconds: float) -> bool:
        """Wait for output, or the end of a stream; return whether it has come."""
        for stream in self._streams:
            if not stream.has_ended and stream.output.exit_code is None:
                self._channel.settimeout(seconds)
                return stream.is_ready()
        time.sleep(seconds)  # until the exit code arrives
        return False

    def _send(self, source: Input, *, keep_open: bool) -> bool:
        sent = 0
        while source.is_open and sent < TURN and self._channel.send_ready():
            piece = source.peek(SENT_PACKET)
            try:
                if piece is None and not keep_open:
                    self._channel.shutdown_write()
                count = self._channel.send(piece) if piece else 0
            except OSError:  # the command has ended, and its exit code is reported
                source.is_open = False
                break
            if not count:
                break
            source.skip(count)
            sent += count
        return sent > 0

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended, and nothing is left to receive."""
        if self._own_exit_code is not None:
            return True
        return all(stream.has_ended for stream in self._streams) and self._channel.exit_status_ready()

    # -- its end ---------------------------------------------------------------------------------------------

    def _finish(self, receivers: Receivers) -> int:
        """Return the exit code. Raises NodeError if it is the connection that has ended, or the shell before
        the command."""
        own, outputs = self._own_exit_code, [stream.output for stream in self._streams]
        exit_code = self._channel.recv_exit_status() if own is None else own
        if exit_code == -1:  # no exit status: killed by a signal, or the connection is gone
            self._connection.transport.join(0.2)  # it closes its channels first, and ends a moment later
            if not self._connection.is_open:
                raise self._broken(None)
            exit_code = 255
        if not outputs[0].has_begun:
            raise login_shell.ended_early(self._label, exit_code, outputs)
        login_shell.record(self._label, outputs[0])
        for output, pass_on in zip(outputs, receivers, strict=True):
            if rest := output.rest():
                pass_on(rest)
        return int(exit_code)

    @property
    def _own_exit_code(self) -> int | None:
        """The command's own exit code, once its output is complete on both streams."""
        codes = [stream.output.exit_code for stream in self._streams]
        return None if None in codes else codes[0]

    def _timed_out(self, limit: str) -> ConnectionLost:
        return ConnectionLost(
            f"{self._label}: {limit}",
            f" to: {short(self._command)}",
            hint="is the node alive? `cloudddp status` shows its state; try `cloudddp exec -- uptime`",
        )

    def _broken(self, error: Exception | None) -> ConnectionLost:
        import paramiko

        if not self._connection.is_open:
            error = self._connection.reason_of_end()
        if error is None or isinstance(error, (OSError, EOFError)):
            cause = "connection closed"
        elif isinstance(error, paramiko.SSHException):
            cause = one_line(str(error), 200)  # paramiko quotes what the node has sent
        else:
            cause = f"it sent an invalid packet ({type(error).__name__})"
        return ConnectionLost(
            f"{self._label}: the SSH connection broke ({cause})",
            f" in: {short(self._command)}",
            hint="`cloudddp status` shows whether the node still exists",
        )


def _close(channel: paramiko.Channel) -> None:
    import paramiko

    # On a broken connection: an error here would take the place of the one that the user needs.
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


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
