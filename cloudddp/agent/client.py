"""Calls the agent on the nodes: ships it, runs a step on one node or on all, decodes the reply.

A `Runner` carries commands to nodes: the SSH fleet, or the stand-in of a dry run. Over SSH one process on a
node does its steps one after another (session.py). The agent's sources are checked by their hash before each
start, which catches accidents and other versions. It does not protect against a rank, which may replace any
program of its user: replies.py does.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from cloudddp import timings
from cloudddp.agent import program, replies
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError, encode
from cloudddp.agent.replies import decode
from cloudddp.agent.session import AgentSession
from cloudddp.errors import ConnectionLost, NodeError
from cloudddp.files import payload_text
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.fleet import Outcome
from cloudddp.ssh.running import CommandSpec, Result

T = TypeVar("T")
Reply = TypeVar("Reply", covariant=True)


class Runner(Protocol):
    """Carries a command to a node, by node rank."""

    @property
    def nodes(self) -> Iterable[int]: ...

    @property
    def ids(self) -> Mapping[int, str]:
        """The EC2 instance id of each node, by node rank."""

    def connection(self, node: int) -> Connection | None:
        """Return the connection on which one process of the agent can do several steps; None: each is a
        command."""

    def run(self, node: int, spec: CommandSpec) -> Result: ...

    def each(
        self,
        work: Callable[[int], T],
        *,
        nodes: Iterable[int] | None = ...,
        fatal: Callable[[Exception], bool] = ...,
        meanwhile: Callable[[], Mapping[int, Exception] | None] = ...,
    ) -> Outcome[T]: ...

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


def run_script(
    runner: Runner,
    node: int,
    name: str,
    *words: str,
    problem: str,
    hint: str = "",
    root: bool = False,
    seconds: float = 60.0,
    on_stdout: Callable[[bytes], None] | None = None,
) -> bytes:
    """Run infra/node/NAME with these arguments on a node, by sudo if `root`, and return its output. It has so
    many seconds; with `on_stdout`, between two bytes. Raises NodeError, with `problem` where it fails."""
    command = shlex.join([*("sudo", "-n") * root, "sh", "-s", "--", *words])
    script, total = payload_text(f"infra/node/{name}").encode(), None if on_stdout else seconds
    # What the login shell prints at its exit is no output of the script.
    spec = CommandSpec(
        command, script, seconds, on_stdout, limit=1 << 20, total_timeout=total, until_exit=True
    )
    result = runner.run(node, spec)
    if result.exit_code:
        raise NodeError(f"node {node}: {problem}: {replies.failure_text(result)}", hint=hint)
    return result.stdout


def run_step(
    runner: Runner,
    node: int,
    request: Step,
    *,
    body: Callable[[], Iterable[bytes]] | None = None,
    timeout: float | None = 60.0,
    on_stdout: Callable[[bytes], None] | None = None,
    on_stderr: Callable[[bytes], None] | None = None,
) -> Result:
    """Run one step of the agent on a node and return what it wrote.

    What `body` returns follows the request on stdin. An agent that is missing or changed is sent for a second
    try. Raises RefusedByAgent, NodeError, ProtocolError.
    """
    is_short = on_stdout is None or body is not None  # else it lasts for as long as somebody reads
    spec = CommandSpec(
        program.step_command(request.STEP),
        command_timeout=timeout,
        on_stdout=on_stdout,
        on_stderr=on_stderr,
        limit=_limit(request),
        # A reply must arrive completely within the time limit; a stream has no limit.
        total_timeout=timeout if on_stdout is None and body is None else None,
    )
    message = encode(request)

    def once() -> Result:
        """Run it in the agent's process that serves the node, or in one of its own where that is not
        possible."""
        if (connection := runner.connection(node)) is not None:
            session = AgentSession.of(connection, node, program.step_command("serve"))
            after = replace(spec, stdin=b"" if body is None else body())
            if (served := session.run(request.STEP, message, after)) is not None:
                return served
        line = message + b"\n"
        stdin = line if body is None else itertools.chain((line,), body())
        return runner.run(node, replace(spec, stdin=stdin))

    try:
        with timings.span(f"agent: {request.STEP}", node) if is_short else contextlib.nullcontext():
            result = once()
            if result.exit_code == ExitCode.NO_AGENT:
                shipped = runner.run(node, CommandSpec(program.ship(), program.compressed_agent()))
                result = shipped if shipped.exit_code else once()
        replies.raise_refusal(node, result)
    except ConnectionLost as error:  # the user does not know the command
        doing = f", in step {request.STEP!r} of the agent"
        raise ConnectionLost(error.reason, doing, hint=error.hint) from None
    return result


def _limit(request: Step) -> int:
    """Return how many bytes the reply may have."""
    return getattr(request, "LIMIT", MAX_REPLY)


def call(
    runner: Runner,
    node: int,
    request: Request[T],
    *,
    timeout: float | None = 60.0,
    on_stderr: Callable[[int, bytes], None] | None = None,
) -> T:
    """Run a step on one node and return its reply. Raises NodeError with the node's error text, or if the
    reply does not fit the protocol. `on_stderr` gets what the step writes to stderr, as it arrives."""
    last = bytearray()  # of what was passed on: it says why the step failed

    def pass_on(data: bytes) -> None:
        last[:] = (last + data)[-(4 * replies.LONGEST_REASON) :]
        if on_stderr is not None:
            on_stderr(node, data)

    try:
        receive = None if on_stderr is None else pass_on
        result = run_step(runner, node, request, timeout=timeout, on_stderr=receive)
        if result.exit_code:
            result = replace(result, stderr=bytes(last) or result.stderr)
            raise NodeError(f"node {node}: step {request.STEP!r} failed: {replies.failure_text(result)}")
        kind: Any = request.REPLY
        reply: T = decode(result.stdout, kind, limit=_limit(request))
        return reply
    except ProtocolError as error:
        raise replies.unreadable(node, request.STEP, error) from None


def call_all(
    runner: Runner,
    requests: Mapping[int, Request[T]],
    *,
    timeout: float | None = 60.0,
    silent: dict[int, NodeError] | None = None,
    on_stderr: Callable[[int, bytes], None] | None = None,
) -> dict[int, T]:
    """Run a step on these nodes at the same time, and return what `call` would for each; the first failure is
    raised. `silent` takes the failures of nodes whose connection breaks or that do not answer, unless none
    answers. `on_stderr` is called in the thread of each node."""

    def one(node: int) -> T:
        return call(runner, node, requests[node], timeout=timeout, on_stderr=on_stderr)

    done = runner.each(
        one, nodes=requests, fatal=lambda error: silent is None or not isinstance(error, ConnectionLost)
    )
    lost = {node: error for node, error in done.errors.items() if isinstance(error, ConnectionLost)}
    if silent is not None and done.values and len(lost) == len(done.errors):
        silent.update(lost)
        done.errors.clear()
    return done.all()


def repeated(runner: Runner, work: Callable[[int], T]) -> Callable[[int], T]:
    """Return a function that does the same, and once more over a new connection if the first one breaks."""

    def twice(node: int) -> T:
        try:
            return work(node)
        except ConnectionLost as error:
            try:
                runner.reconnect(node)
            except NodeError:
                raise error from None
        return work(node)

    return twice
