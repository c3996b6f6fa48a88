"""Steps of the agent over one channel per node, one after another: its process serves them for as long as the
connection lasts.

A step that begins while another one runs has a command of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import chain

from cloudddp.agent.protocol import codec
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.running import BoundedBuffer, CommandSpec, Input, Result, RunningCommand
from cloudddp.ssh.time_limits import Activity

_LONGEST_END = 16  # bytes that end the output of a step


class _Step:
    """A step that runs: what it has written, and how that ends."""

    def __init__(self, spec: CommandSpec, label: str, *, is_last: bool) -> None:
        self._is_last = is_last
        self._out, self._err = (BoundedBuffer(label, spec.limit) for _ in range(2))
        self._take_out, self._take_err = spec.on_stdout or self._out.add, spec.on_stderr or self._err.add
        self._end: bytes | None = None  # what has come of the end of stdout
        self._has_stderr_end = False
        self.has_output_after_end = False  # the process has taken the rest of the input for a request

    def stdout(self, data: bytes) -> None:
        if self._is_last:
            self._take_out(data)
            return
        if self._end is None:
            head, found, rest = data.partition(b"\0")
            if head:
                self._take_out(head)
            if not found:
                return
            self._end, data = b"\0", rest
        end, newline, more = (self._end + data).partition(b"\n")
        self._end = end + newline
        self.has_output_after_end = self.has_output_after_end or bool(more)
        if len(self._end) > _LONGEST_END:
            raise ProtocolError("its output does not end as that of a step")

    def stderr(self, data: bytes) -> None:
        head, found, more = (data, b"", b"") if self._is_last else data.partition(codec.STDERR_END)
        if self._has_stderr_end:
            head, more = b"", data
        self._has_stderr_end = self._has_stderr_end or bool(found)
        self.has_output_after_end = self.has_output_after_end or bool(more)
        if head:
            self._take_err(head)

    def has_ended(self) -> bool:
        return self._end is not None and self._end.endswith(b"\n") and self._has_stderr_end

    def exit_code(self) -> int:
        """Return the exit code of a step that has ended. Raises ProtocolError."""
        return codec.read_stdout_end(self._end or b"")

    def result(self, code: int) -> Result:
        return Result(code, bytes(self._out.data), bytes(self._err.data))


class AgentSession:
    """The agent's process on one node, and the next one after it has ended."""

    def __init__(self, connection: Connection, node: int, command: str) -> None:
        self._connection, self._node, self._command = connection, node, command
        self._lock = threading.Lock()
        self._process: RunningCommand | None = None

    @classmethod
    def of(cls, connection: Connection, node: int, command: str) -> AgentSession:
        """Return the session of a connection: there is one, as long as the connection lasts."""
        kept = connection.kept.setdefault(cls, cls(connection, node, command))
        assert isinstance(kept, cls)  # noqa: S101
        return kept

    def run(
        self, step: str, request: bytes, spec: CommandSpec, *, is_last: bool = False, then: Iterable[str] = ()
    ) -> Result | None:
        """Do a step and return its result; None if another one runs, and nothing was done.

        Of the `spec`, stdin is what follows the request; its command names the step in error messages. After
        the last step, the process ends. `then`: the steps that are likely to follow. Raises what
        Connection.run raises, and ProtocolError.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            result, can_go_on = self._run(
                codec.ask(step, request, is_last=is_last, then=then), spec, is_last=is_last
            )
            if not can_go_on:
                self._end()
            return result
        except BaseException:
            self._end()
            raise
        finally:
            self._lock.release()

    def _run(self, asked: bytes, spec: CommandSpec, *, is_last: bool) -> tuple[Result, bool]:
        """Return the result of a step, and whether the process can do another one."""
        activity = Activity(spec.command_timeout, spec.total_timeout)
        process = self._start(activity)
        step = _Step(spec, f"node {self._node}", is_last=is_last)
        source = Input(asked + spec.stdin if isinstance(spec.stdin, bytes) else chain((asked,), spec.stdin))
        code = process.exchange(
            source, (step.stdout, step.stderr), activity, until=step.has_ended, keep_open=not is_last
        )
        if code is not None:  # the process has ended
            if not is_last and not code:
                raise ProtocolError("its process has ended without an answer")
            return step.result(code), False
        code = step.exit_code()
        # Input that is left would be taken for the next request, and a step that failed may have left its
        # input unread.
        return step.result(code), not code and not step.has_output_after_end and source.is_sent

    def _start(self, activity: Activity) -> RunningCommand:
        """Return the process. What one has written while no step ran is no answer."""
        if self._process is not None and not self._process.is_quiet:
            self._end()
        if self._process is None:
            self._process = self._connection.start(self._command, activity)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
