"""Calls the agent on the nodes: ships it, runs a step on one node or on all, decodes the reply.

A `Runner` carries commands to nodes: the SSH fleet, or the stand-in of a dry run. `start_step` does steps one after another
in one process on the node (session.py); `run_step` starts a command. The agent's file is checked by its hash before each
start, which catches accidents and other versions. It does not protect against a rank, which may replace any program of its
user: decode.py does.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from cloudddp import timings
from cloudddp.agent import commands, failures
from cloudddp.agent.decode import decode
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError, encode
from cloudddp.agent.session import CommandStarter, Session
from cloudddp.errors import NodeError
from cloudddp.ssh.command_loop import OnEnd
from cloudddp.ssh.fleet import Outcome, gather
from cloudddp.ssh.running import MAX_OUTPUT, CommandSpec, Result

T = TypeVar("T")
Reply = TypeVar("Reply", covariant=True)


class Starter(CommandStarter, Protocol):
    """Starts a command on a node."""

    @property
    def per_connection(self) -> dict[int, object] | None:
        """What is kept for a node as long as its connection lasts: its Session. None where nothing can be kept."""
        ...


class Runner(Starter, Protocol):
    """Carries a command to a node, by node rank."""

    @property
    def nodes(self) -> Iterable[int]: ...

    @property
    def ids(self) -> Mapping[int, str]:
        """The EC2 instance id of each node, by node rank."""

    def run(
        self,
        node: int,
        command: str,
        *,
        stdin: bytes | Iterable[bytes] = b"",
        command_timeout: float | None = 60.0,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        limit: int = MAX_OUTPUT,
        total_timeout: float | None = None,
    ) -> Result: ...

    def each(self, work: Callable[[int], T], *, fatal: Callable[[Exception], bool] = ...) -> Outcome[T]: ...

    def host_key(self, node: int) -> str: ...

    def expect(self, node: int, host_key: str) -> None: ...

    def leave_out(self, nodes: Iterable[int]) -> None: ...

    def reconnect(self, node: int, wanted: Callable[[], bool] = ...) -> None: ...

    def close(self) -> None: ...


class Step(Protocol):
    """A request of the protocol."""

    @property
    def STEP(self) -> str: ...  # noqa: N802


class Request(Step, Protocol[Reply]):
    """A request that is answered by one reply."""

    @property
    def REPLY(self) -> Callable[..., Reply]: ...  # noqa: N802


def run_step(
    runner: Runner,
    node: int,
    request: Step,
    *,
    body: Iterable[bytes] | None = None,
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = MAX_REPLY,
    on_stdout: Callable[[bytes], None] | None = None,
    on_stderr: Callable[[bytes], None] | None = None,
) -> Result:
    """Run one step of the agent on a node and return what it wrote. Output is taken in the caller's thread, which may be
    slow; so it has a command of its own.

    The request is the first line of stdin, `body` follows it. With `ship` the agent itself is on stdin, and the request
    in argv, which every user of the node can read: no request with secrets is sent like that. An agent that turns out
    to be missing or changed is shipped for a second try, unless there is a `body`, which can be read only once.
    Raises RefusedByAgent, NodeError.
    """
    ends: list[Result | Exception] = []
    start_step(
        _AtOnce(runner), node, request, ends.append,
        body=body, ship=ship, timeout=timeout, limit=limit, on_stdout=on_stdout, on_stderr=on_stderr,
    )  # fmt: skip
    (end,) = ends
    if isinstance(end, Exception):
        raise end
    return end


class _AtOnce:
    """Starts a command by running it to its end."""

    per_connection = None

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def start(self, node: int, spec: CommandSpec, on_end: OnEnd) -> None:
        run_at_once(self._runner, node, spec, on_end)


def run_at_once(runner: Runner, node: int, spec: CommandSpec, on_end: OnEnd) -> None:
    """Run a command to its end, and pass on its result or error."""
    end: Result | Exception
    try:
        end = runner.run(
            node,
            spec.command,
            stdin=spec.stdin,
            command_timeout=spec.command_timeout,
            on_stdout=spec.on_stdout,
            on_stderr=spec.on_stderr,
            limit=spec.limit,
            total_timeout=spec.total_timeout,
        )
    except Exception as error:
        end = error
    on_end(end)


def start_step(
    runner: Starter,
    node: int,
    request: Step,
    on_end: OnEnd,
    *,
    body: Iterable[bytes] | None = None,
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = MAX_REPLY,
    on_stdout: Callable[[bytes], None] | None = None,
    on_stderr: Callable[[bytes], None] | None = None,
    span: bool = True,
    is_last: bool = False,
    then: Sequence[str] = (),
) -> None:
    """Start one step of the agent on a node, without waiting. `on_end` gets what run_step returns or raises; it, the body
    and the output run in a thread that serves all nodes. `span`: record its time for --timings. `is_last`: of this node, as
    far as is known; `then`: those that are likely to follow it."""
    _Call(runner, node, request, on_end, body, is_last=is_last, then=then, span=span).begin(
        CommandSpec(
            commands.step_command(request.STEP),
            command_timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            limit=limit,
            # A reply must arrive completely within the time limit; a stream has no limit.
            total_timeout=timeout if on_stdout is None and body is None else None,
        ),
        ship=ship,
    )


class _Call:
    """A step that was started on a node: the agent is shipped if it turns out that the node lacks it."""

    def __init__(
        self, runner: Starter, node: int, request: Step, on_end: OnEnd, body: Iterable[bytes] | None, *,
        is_last: bool, then: Sequence[str], span: bool,
    ) -> None:  # fmt: skip
        self._runner, self._node, self._request, self._on_end = runner, node, request, on_end
        self._body, self._is_last, self._then, self._span = body, is_last, then, span
        self._message = encode(request)
        self._may_ship = body is None  # which can be read only once
        self._began = time.monotonic()

    def begin(self, spec: CommandSpec, *, ship: bool = False) -> None:
        """Start it. Of the `spec`, stdin is added here; with `ship`, also the command."""
        self._spec = spec
        if ship:
            self._may_ship = False
            command = commands.ship(commands.agent_command(self._request.STEP, self._message.decode()))
            self._runner.start(
                self._node, replace(spec, command=command, stdin=commands.parcel()), self._ended
            )
        elif not self._begin_in_session(replace(spec, stdin=self._body or b"")):
            line = self._message + b"\n"
            stdin = line if self._body is None else itertools.chain((line,), self._body)
            self._runner.start(self._node, replace(spec, stdin=stdin), self._ended)

    def _begin_in_session(self, spec: CommandSpec) -> bool:
        """Begin it in the agent's process that serves the node, where one can; return whether it was begun."""
        kept, node = self._runner.per_connection, self._node
        if kept is None:
            return False
        session = kept.get(node)
        if not isinstance(session, Session) or session.is_over:
            session = kept[node] = Session(self._runner, node, commands.step_command("serve"))
        return session.begin(
            self._request.STEP, self._message, spec, self._ended, is_last=self._is_last, then=self._then
        )

    def _ended(self, end: Result | Exception) -> None:
        if not self._may_ship or isinstance(end, Exception) or end.exit_code != ExitCode.NO_AGENT:
            self._finish(end)
            return
        self._may_ship = False
        self._runner.start(self._node, CommandSpec(commands.ship("exit 0"), commands.parcel()), self._shipped)

    def _shipped(self, end: Result | Exception) -> None:
        if isinstance(end, Exception) or end.exit_code:
            self._finish(end)
        else:
            self.begin(self._spec)

    def _finish(self, end: Result | Exception) -> None:
        if self._span:
            timings.add(f"agent: {self._request.STEP}", self._began, time.monotonic(), self._node)
        try:
            if isinstance(end, Exception):
                raise end
            failures.raise_refusal(self._node, end)
        except NodeError as error:
            end = failures.of_step(self._request.STEP, error)
        except Exception as error:
            end = error
        self._on_end(end)


def call(
    runner: Runner,
    node: int,
    request: Request[T],
    *,
    body: Iterable[bytes] | None = None,
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = MAX_REPLY,
    on_stderr: Callable[[bytes], None] | None = None,
) -> T:
    """Run a step on one node and return its reply. Raises NodeError with the node's error text, or if the reply
    does not fit the protocol. `on_stderr` gets what the step writes to stderr, as it arrives."""
    last = _Tail(on_stderr)
    result = run_step(
        runner, node, request, body=body, ship=ship, timeout=timeout, limit=limit,
        on_stderr=last.receive if on_stderr is not None else None,
    )  # fmt: skip
    return _reply(
        node, request, result if on_stderr is None else replace(result, stderr=bytes(last.data)), limit
    )


def gather_replies(
    runner: Runner,
    requests: Mapping[int, Request[T]],
    *,
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = MAX_REPLY,
    on_stderr: Callable[[int, bytes], None] | None = None,
    then: Sequence[str] = (),
    fatal: Callable[[Exception], bool] = lambda _: True,
) -> Outcome[T]:
    """Run a step on all nodes at the same time, however many they are, and return what `call` would for each."""

    def start(node: int, request: Request[T], on_end: Callable[[T | Exception], None]) -> None:
        last = _Tail(functools.partial(on_stderr, node) if on_stderr is not None else None)

        def ended(end: Result | Exception) -> None:
            try:
                if isinstance(end, Exception):
                    raise end
                result = end if on_stderr is None else replace(end, stderr=bytes(last.data))
                on_end(_reply(node, request, result, limit))
            except ProtocolError as error:
                on_end(failures.unreadable(node, request.STEP, error))
            except Exception as error:
                on_end(error)

        start_step(
            runner, node, request, ended, ship=ship, timeout=timeout, limit=limit,
            on_stderr=None if on_stderr is None else last.receive, then=then,
        )  # fmt: skip

    starts = {node: functools.partial(start, node, request) for node, request in requests.items()}
    return gather(starts, fatal=fatal, on_stop=runner.close)


class _Tail:
    """Passes on what a step writes to stderr, and keeps its end, which says why the step failed."""

    def __init__(self, receive: Callable[[bytes], None] | None) -> None:
        self.data = bytearray()
        self._receive = receive

    def receive(self, data: bytes) -> None:
        self.data[:] = (self.data + data)[-(4 * failures.LONGEST_REASON) :]
        if self._receive is not None:
            self._receive(data)


def _reply(node: int, request: Request[T], result: Result, limit: int) -> T:
    """Decode the reply of a step. Raises NodeError."""
    step = request.STEP
    if result.exit_code:
        raise NodeError(f"node {node}: step {step!r} failed: {failures.failure_text(result)}")
    kind: Any = request.REPLY
    try:
        reply: T = decode(result.stdout, kind, limit=limit)
    except ProtocolError as error:
        raise failures.unreadable(node, step, error) from None
    return reply


def call_all(
    runner: Runner,
    request: Callable[[int], Request[T]],
    *,
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = MAX_REPLY,
    then: Sequence[str] = (),
    silent: dict[int, NodeError] | None = None,
) -> dict[int, T]:
    """Run a step on every node at once, with the request for each, and return the replies by node; the first failure is
    raised. `silent` takes the failures of nodes whose connection breaks or that do not answer, unless none answers."""
    done = gather_replies(
        runner, {node: request(node) for node in runner.nodes}, ship=ship, timeout=timeout, limit=limit, then=then,
        fatal=lambda error: silent is None or not failures.is_silence(error),
    )  # fmt: skip
    if silent is not None and done.values and all(map(failures.is_silence, done.errors.values())):
        silent.update({node: error for node, error in done.errors.items() if isinstance(error, NodeError)})
        done.errors.clear()
    return done.all()
