"""A command that runs on a node: started over an authenticated connection, advanced by some thread, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudddp.config.timing import Timing
from cloudddp.errors import Command, NodeError
from cloudddp.ssh import login_shell
from cloudddp.ssh.channel import Activity, CommandIO, time_limit
from cloudddp.text import one_line

if TYPE_CHECKING:
    import paramiko

MAX_OUTPUT = 4 << 20  # bytes of a command's output that are kept by default
MAX_PACKET = 128 << 10  # bytes that a server may put into one packet; paramiko's default is 32 KiB


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command. Output is bytes: a node's text need not be UTF-8."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command to run, its input and its limits.

    `stdin` may be a stream of pieces, which is sent while output is read. b"" means that there is nothing to send yet: it
    is asked again a moment later, or, if it is a WakingInput, when it calls. With `on_stdout` the output is passed on as it
    arrives and Result.stdout is empty; `on_stderr` likewise. Otherwise at most `limit` bytes of each stream are kept: a
    command that writes more is ended, with NodeError.

    `command_timeout` is the longest time, in seconds, in which the command neither sends nor accepts a byte; None sets no
    limit once the server has started it (keepalives still find a dead node). `total_timeout` limits the whole command: a
    node that sends a byte now and then would otherwise never time out. `activity` has limits that change, in place of both.

    `until_exit`: it ends with its own process, also if one that it left in the background still holds its output open.
    """

    command: str
    stdin: bytes | Iterable[bytes] = b""
    command_timeout: float | None = 60.0
    on_stdout: Callable[[bytes], None] | None = None
    on_stderr: Callable[[bytes], None] | None = None
    limit: int = MAX_OUTPUT
    total_timeout: float | None = None
    activity: Activity | None = None
    until_exit: bool = False


class RunningCommand:
    """A command that a node runs. Only one thread at a time may use it."""

    def __init__(
        self,
        label: str,
        transport: paramiko.Transport | None,
        spec: CommandSpec,
        limits: Timing,
        *,
        window: int,
        wake: Callable[[], None],
    ) -> None:
        """Start it. `window`: how many bytes of its output may be in memory. Raises NodeError."""
        self._label, self._transport, self._spec = label, transport, spec
        self._activity = spec.activity or Activity(spec.command_timeout, spec.total_timeout)
        self._out, self._err = (BoundedBuffer(label, spec.command, spec.limit) for _ in range(2))
        self._marker = login_shell.Marker(at_exit=spec.until_exit)
        receivers = spec.on_stdout or self._out.add, spec.on_stderr or self._err.add
        self._outputs = [login_shell.Output(label, self._marker, receive) for receive in receivers]
        self._io = self._start(limits, window, wake)

    def _start(self, limits: Timing, window: int, wake: Callable[[], None]) -> CommandIO:
        import paramiko

        spec, activity, transport = self._spec, self._activity, self._transport
        silence = limits.start if activity.silence is None else activity.silence
        channel = None
        try:
            if transport is None or not transport.is_active():
                raise self._reason_of_end()
            channel = transport.open_session(window, MAX_PACKET, timeout=activity.left(silence))
            channel.settimeout(activity.silence)
            activity.record()
            stdout, stderr = self._outputs
            io = CommandIO(channel, spec.stdin, activity, (stdout.feed, stderr.feed), wake)
            with time_limit(activity.left(silence), channel):  # paramiko has no limit for this reply
                text = self._marker.command(spec.command)
                channel.exec_command(text.encode("utf-8", "surrogateescape"))  # a path need not be UTF-8
            return io
        except BaseException as error:
            if channel is not None:
                channel.close()
            timed_out = isinstance(error, TimeoutError) or (
                str(error) == "Timeout opening channel." and transport is not None and transport.is_active()
            )
            if timed_out:
                raise self._timed_out(activity.reason(silence)) from None
            if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
                raise self._broken(error) from None
            raise

    @property
    def patience(self) -> float:
        """Return how many seconds may pass until the next call of `advance`."""
        return self._io.patience

    def advance(self) -> int:
        """Send and receive what is possible at once; return the state of the CommandIO.

        Raises NodeError if the connection breaks or a time limit passes, and what input and receivers of output raise.
        """
        import paramiko

        try:
            state = self._io.advance()
            return CommandIO.ENDED if self._exit_code is not None else state
        except TimeoutError:
            raise self._timed_out(self._activity.reason()) from None
        except (paramiko.SSHException, EOFError) as error:  # an OSError comes from stdin or from on_stdout
            raise self._broken(error) from None

    def result(self) -> Result:
        """Return the result of a command that has ended. Raises NodeError if it is the connection that has, or the shell
        before the command."""
        stdout, stderr = self._outputs
        exit_code = self._io.channel.exit_status if self._exit_code is None else self._exit_code
        if exit_code == -1:  # no exit status: killed by a signal, or the connection is gone
            transport = self._transport
            if transport is not None:  # it closes its channels first, and becomes inactive a moment later
                transport.join(0.2)
            if transport is None or not transport.is_active():
                raise self._broken(self._reason_of_end())
            exit_code = 255
        if not stdout.has_begun:
            raise login_shell.ended_early(self._label, exit_code, (stdout, stderr))
        login_shell.record(self._label, stdout)
        for output in self._outputs:
            output.rest()
        return Result(int(exit_code), bytes(self._out.data), bytes(self._err.data))

    @property
    def _exit_code(self) -> int | None:
        """The command's own exit code, once its output is complete on both streams."""
        codes = [output.exit_code for output in self._outputs]
        return None if None in codes else codes[0]

    def _reason_of_end(self) -> BaseException:
        import paramiko

        error = None if self._transport is None else self._transport.get_exception()
        return error if isinstance(error, paramiko.SSHException) else EOFError("connection closed")

    def close(self) -> None:
        """Close its channel: a command that still runs gets no more input, and its output is lost."""
        self._io.channel.close()

    def _timed_out(self, limit: str) -> NodeError:
        reason = f"{self._label}: {limit}"
        return NodeError(
            f"{reason} to: {_short(self._spec.command)}",
            reason=reason,
            hint=(
                "is the node alive? ",
                Command("status"),
                " shows its state; try ",
                Command("exec", "--", "uptime"),
            ),
        )

    def _broken(self, error: BaseException) -> NodeError:
        cause = one_line(str(error), 200) or "connection closed"  # paramiko quotes what the node has sent
        reason = f"{self._label}: the SSH connection broke ({cause})"
        return NodeError(
            f"{reason} in: {_short(self._spec.command)}",
            reason=reason,
            hint=(Command("status"), " shows whether the node still exists"),
        )


class BoundedBuffer:
    """Keeps what a command writes to one stream, up to a limit in bytes."""

    def __init__(self, label: str, command: str, limit: int) -> None:
        self.data = bytearray()
        self._label, self._command, self._limit = label, command, limit

    def add(self, data: bytes) -> None:
        if len(self.data) + len(data) > self._limit:
            reason = f"{self._label}: its answer is longer than {self._limit >> 20} MiB and was cut off"
            raise NodeError(f"{reason}: {_short(self._command)}", reason=reason)
        self.data += data


def _short(command: str) -> str:
    line = command.strip().splitlines()[0] if command.strip() else ""
    return line if len(line) <= 100 else line[:97] + "..."
