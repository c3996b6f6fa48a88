"""Steps of the agent over one channel per node, one after another: its process serves them for as long as the connection lasts.

A step that begins while another one runs has a command of its own, as on a runner that keeps nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Protocol

from cloudddp.agent.protocol import serve
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.errors import NodeError
from cloudddp.ssh.channel import Activity
from cloudddp.ssh.command_loop import OnEnd
from cloudddp.ssh.running import BoundedBuffer, CommandSpec, Result

_LONGEST_END = 16  # bytes that end the output of a step


class CommandStarter(Protocol):
    """What starts a command on a node, without waiting."""

    def start(self, node: int, spec: CommandSpec, on_end: OnEnd) -> None: ...


class _Step:
    """A step that runs: what is left of its input, what it has written, and what gets its result."""

    def __init__(self, spec: CommandSpec, on_end: OnEnd, label: str, *, is_last: bool) -> None:
        self.on_end, self.is_last = on_end, is_last
        self.input: Iterator[bytes] = iter((spec.stdin,) if isinstance(spec.stdin, bytes) else spec.stdin)
        self.has_input = True
        self.is_starved = False  # its input had nothing to send, and will not say when it has
        self._out, self._err = (BoundedBuffer(label, spec.command, spec.limit) for _ in range(2))
        self._take_out, self._take_err = spec.on_stdout or self._out.add, spec.on_stderr or self._err.add
        self._end: bytes | None = None  # what has come of the end of stdout
        self._has_stderr_end = False
        self.has_output_after_end = False  # the process has taken the rest of the input for a request

    def next_piece(self) -> bytes | None:
        """Return what is to be sent next, b"" for nothing yet, None at the end of the input."""
        piece = next(self.input, None) if self.has_input else None
        self.has_input = piece is not None
        self.is_starved = piece == b""
        return piece

    def stdout(self, data: bytes) -> None:
        if self.is_last:
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
        head, found, more = (data, b"", b"") if self.is_last else data.partition(serve.STDERR_END)
        if self._has_stderr_end:
            head, more = b"", data
        self._has_stderr_end = self._has_stderr_end or bool(found)
        self.has_output_after_end = self.has_output_after_end or bool(more)
        if head:
            self._take_err(head)

    def result(self) -> Result | None:
        """Return the result once the step has ended. Raises ProtocolError."""
        if self._end is None or not self._end.endswith(b"\n") or not self._has_stderr_end:
            return None
        return self.result_of(serve.read_stdout_end(self._end))

    def result_of(self, code: int) -> Result:
        return Result(code, bytes(self._out.data), bytes(self._err.data))


class Session:
    """The agent's process on one node. It is the stdin of its command: what is asked for, and what a step gets. Everything but
    `begin` runs in the thread that serves all nodes."""

    def __init__(self, runner: CommandStarter, node: int, command: str) -> None:
        self._runner, self._node, self._command = runner, node, command
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._is_started = self.is_over = False
        self._activity = Activity(None, None)
        self._wake: Callable[[], None] = lambda: None

    def begin(
        self, step: str, request: bytes, spec: CommandSpec, on_end: OnEnd, *,
        is_last: bool = False, then: Iterable[str] = (),
    ) -> bool:  # fmt: skip
        """Begin a step and return True; return False if it cannot be done here: another one runs, or the process has ended.

        Of the `spec`, stdin is what follows the request; its command names the step in error messages. After the last step,
        the process ends. `then`: the steps that are likely to follow.
        """
        asked = serve.ask(step, request, is_last=is_last, then=then)
        with self._lock:
            if self._step is not None or self.is_over:
                return False
            started = _Step(_after(asked, spec), on_end, f"node {self._node}", is_last=is_last)
            self._activity.begin(spec.command_timeout, spec.total_timeout)
            self._step = started
            is_first, self._is_started = not self._is_started, True
            self.is_over = is_last
        if is_first:
            command = CommandSpec(
                self._command,
                self,
                spec.command_timeout,
                self._stdout,
                self._stderr,
                activity=self._activity,
            )
            self._runner.start(self._node, command, self._ended)
        else:
            self._wake()
        return True

    # -- stdin -------------------------------------------------------------------------------------------------

    def attach(self, wake: Callable[[], None]) -> None:
        """Get what has to be called when there is input again."""
        self._wake = wake

    @property
    def is_starved(self) -> bool:
        """Whether the input has to be asked again soon, for it will not call `wake`."""
        step = self._step
        return step is not None and step.is_starved

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        step = self._step
        if step is None:
            if self.is_over:
                raise StopIteration
            return b""
        piece = step.next_piece()
        if piece is None and step.is_last:
            raise StopIteration
        return piece or b""

    # -- output ------------------------------------------------------------------------------------------------

    def _stdout(self, data: bytes) -> None:
        self._running().stdout(data)
        self._conclude()

    def _stderr(self, data: bytes) -> None:
        self._running().stderr(data)
        self._conclude()

    def _running(self) -> _Step:
        if self._step is None:
            self.is_over = True
            raise NodeError(f"node {self._node}: the agent writes although no step runs")
        return self._step

    def _conclude(self) -> None:
        step = self._running()
        result = step.result()
        if result is None:
            return
        # Input that is left would be taken for the next request.
        is_whole = not step.has_output_after_end and (not step.has_input or step.next_piece() is None)
        with self._lock:
            self._step = None
            self._activity.begin(None, None)
            # A step that failed may have left its input unread.
            self.is_over = self.is_over or bool(result.exit_code) or not is_whole
        if self.is_over:
            self._wake()
        step.on_end(result)

    def _ended(self, end: Result | Exception) -> None:
        """Note the end of the process."""
        with self._lock:
            step, self._step = self._step, None
            self.is_over = True
        if step is None:
            return
        if not isinstance(end, Result):
            step.on_end(end)
        elif step.is_last or end.exit_code:
            step.on_end(step.result_of(end.exit_code))
        else:
            step.on_end(ProtocolError("its process has ended without an answer"))


def _after(asked: bytes, spec: CommandSpec) -> CommandSpec:
    """Return the command with the request before its input."""
    body: Iterable[bytes] = (spec.stdin,) if isinstance(spec.stdin, bytes) else spec.stdin
    return replace(spec, stdin=chain((asked,), body))
