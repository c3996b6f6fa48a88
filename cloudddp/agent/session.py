"""Steps of the agent over one channel per node, one after another: its process serves them for as long as the
connection lasts.

A step that begins while another one runs has a command of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain

from cloudddp.agent.protocol import STREAMS, codec
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.running import BoundedBuffer, CommandSpec, Input, Result, RunningCommand
from cloudddp.ssh.time_limits import IdleTimer

_LONGEST_END = 16  # bytes that end the output of a step


class _Output:
    """What a step writes to one stream. It is passed on, up to the byte that ends it; the output of the last
    step may be any bytes. `end`: what has come after that, as far as it matters."""

    def __init__(self, take: Callable[[bytes], object], *, is_last: bool) -> None:
        self._take, self._is_last = take, is_last
        self.end: bytes | None = None

    def add(self, data: bytes) -> None:
        if self.end is None:
            head, found, data = (data, b"", b"") if self._is_last else data.partition(codec.STDERR_END)
            if head:
                self._take(head)
            if not found:
                return
            self.end = b""
        self.end = (self.end + data)[:_LONGEST_END]


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

    def run(self, step: str, request: bytes, spec: CommandSpec) -> Result | None:
        """Do a step and return its result; None if another one runs, and nothing was done.

        Of the `spec`, stdin is what follows the request; its command names the step in error messages. Raises
        what Connection.run raises, and ProtocolError.
        """
        if not self._lock.acquire(blocking=False):
            return None
        is_last, can_go_on = step in STREAMS, False
        try:
            idle = IdleTimer(spec.command_timeout, spec.total_timeout)
            process = self._start(idle)
            asked, body = codec.ask(step, request, is_last=is_last), spec.stdin
            source = Input(asked + body if isinstance(body, bytes) else chain((asked,), body))
            kept = [BoundedBuffer(f"node {self._node}", spec.limit) for _ in range(2)]
            out = _Output(spec.on_stdout or kept[0].add, is_last=is_last)
            err = _Output(spec.on_stderr or kept[1].add, is_last=is_last)

            def has_ended() -> bool:
                end = out.end or b""
                if len(end) == _LONGEST_END and b"\n" not in end:
                    raise ProtocolError("its output does not end as that of a step")
                return b"\n" in end and err.end is not None

            code = process.exchange(source, (out.add, err.add), idle, until=has_ended, keep_open=not is_last)
            if code is None:
                end, _, more = (out.end or b"").partition(b"\n")
                code = codec.read_stdout_end(b"\0" + end + b"\n")
                # Input that is left would be taken for the next request. Where there is output after the end,
                # some was; and a step that failed may have left its input unread.
                can_go_on = not (code or more or err.end) and source.is_sent
            elif not is_last and not code:
                raise ProtocolError("its process has ended without an answer")
            return Result(code, *(bytes(one.data) for one in kept))
        finally:
            try:
                if not can_go_on:
                    self._end()
            finally:  # Ctrl-C may come while it ends
                self._lock.release()

    def _start(self, idle: IdleTimer) -> RunningCommand:
        """Return the process. What one has written while no step ran is no answer."""
        if self._process is not None and not self._process.is_quiet:
            self._end()
        if self._process is None:
            self._process = self._connection.start(self._command, idle)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
