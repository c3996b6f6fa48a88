"""Talking to the agent on the nodes: ship it, call a step of it on one node or on all, decode its answer.

A `Runner` carries commands to nodes: the SSH fleet, or the stand-in of a rehearsal. One command a step, however
much the step does, since each is a round trip. The agent's file is checked by its hash before each use, which
catches accidents and old versions; it is no defence against a rank, which may replace whatever its user runs. That
defence is protocol.py: an answer is decoded here, into a typed and bounded record, before any other code sees it.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from cloudddp import payload, protocol
from cloudddp.errors import NodeError
from cloudddp.protocol import ProtocolError
from cloudddp.ssh.connection import MAX_OUTPUT, Result
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import one_line

T = TypeVar("T")

NO_AGENT = 97  # exit code of a step whose agent is missing on the node, or is not the one that was shipped
_LONGEST_REASON = 500  # characters of a node's own words in a message


class Runner(Protocol):
    """Carries a command to a node, by node rank."""

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

    def reconnect(self, node: int) -> None: ...

    def close(self) -> None: ...


@functools.cache
def agent_source() -> bytes:
    """Return the agent's program: read once, so that one command speaks to one agent throughout."""
    return payload.text("infra/node/agent.py").encode()


@functools.cache
def _agent_hash() -> str:
    return hashlib.sha256(agent_source()).hexdigest()


def agent_version() -> str:
    """Return what names the agent of this version of cloudddp: the beginning of its hash."""
    return _agent_hash()[:12]


def agent_path() -> str:
    """Return the agent's path on a node, below the home folder."""
    return f".cloudddp/agent-{agent_version()}.py"


def _intact() -> str:
    """Return the shell's test that the agent's file is there and whole."""
    return f'[ "$(sha256sum 2>/dev/null < "$HOME"/{agent_path()})" = "{_agent_hash()}  -" ]'


def _run_agent(verb: str, *arguments: str) -> str:
    return f'exec python3 -I -X utf8 "$HOME"/{agent_path()} {shlex.join([verb, *arguments])}'


def _ship(then: str) -> str:
    """Return the command that takes the agent from stdin and puts it in place whole, then does something else.

    One that is in place and intact is left there: a node whose disk is full can still be asked.
    """
    path = f'"$HOME"/{agent_path()}'
    return (
        'umask 077; mkdir -p "$HOME"/.cloudddp && '
        f"if {_intact()}; then cat > /dev/null; else cat > {path}.$$ && mv -f {path}.$$ {path}; fi && {then}"
    )


def run_step(
    runner: Runner,
    node: int,
    verb: str,
    *arguments: str,
    stdin: bytes | Iterable[bytes] = b"",
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = protocol.MAX_REPLY,
    on_stdout: Callable[[bytes], None] | None = None,
    on_stderr: Callable[[bytes], None] | None = None,
) -> Result:
    """Run one step of the agent on a node and return what it wrote. `ship`: the agent goes along on stdin, so that
    the step itself gets none. An agent that turns out to be missing or changed is shipped, for one more try."""
    step = _run_agent(verb, *arguments)

    def run(command: str, data: bytes | Iterable[bytes]) -> Result:
        return runner.run(
            node,
            command,
            stdin=data,
            command_timeout=timeout,
            limit=limit,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            # What is awaited as a whole has to come within the time; a stream is as long as it is.
            total_timeout=timeout if on_stdout is None and isinstance(data, bytes) else None,
        )

    if ship:
        return run(_ship(step), agent_source())
    result = run(f"{_intact()} || exit {NO_AGENT}; {step}", stdin)
    if result.exit_code == NO_AGENT and isinstance(stdin, bytes):
        shipped = run(_ship("exit 0"), agent_source())
        return shipped if shipped.exit_code else run(step, stdin)
    return result


def call(
    runner: Runner,
    node: int,
    verb: str,
    *arguments: str,
    answer: type[T],
    stdin: bytes | Iterable[bytes] = b"",
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = protocol.MAX_REPLY,
) -> T:
    """Run a step on one node and return its answer. Raises NodeError with the node's own words, or where the answer
    is none that the agent gives."""
    result = run_step(runner, node, verb, *arguments, stdin=stdin, ship=ship, timeout=timeout, limit=limit)
    if result.exit_code:
        raise NodeError(f"node {node}: step {verb!r} failed: {last_words(result)}")
    return decode(node, verb, result.stdout, answer, limit=limit)


def decode(node: int, verb: str, output: bytes, answer: type[T], *, limit: int = protocol.MAX_REPLY) -> T:
    """Return the answer on the last line of a step's output (a .bashrc may have written before). Raises NodeError."""
    try:
        return protocol.decode(output.rstrip().rpartition(b"\n")[2], answer, limit=limit)
    except ProtocolError as error:
        raise unreadable(node, verb, error) from None


def unreadable(node: int, verb: str, error: ProtocolError) -> NodeError:
    """Return what an answer means that no agent gives: the node runs something else in the agent's place."""
    return NodeError(
        f"node {node} sent an answer that cloudddp cannot read (step {verb!r} of agent {agent_version()}): {error}",
        hint="a program on that node has replaced the agent or writes into its output; "
        f"look with `cloudddp ssh {node}`, or end the cluster with `cloudddp down`",
    )


def last_words(result: Result) -> str:
    """Return the last line that a command wrote, safe to show, or its exit code where it wrote nothing."""
    if result.exit_code == NO_AGENT and not result.stderr:
        return "the agent's file there is missing or was changed; repeat the command"
    text = (result.stderr or result.stdout)[-(4 * _LONGEST_REASON) :].decode(errors="replace")
    lines = text.strip().splitlines()
    return one_line(lines[-1], _LONGEST_REASON) if lines else f"exit code {result.exit_code}"


def call_all(
    runner: Runner,
    verb: str,
    arguments: Callable[[int], Sequence[str]] = lambda _: (),
    *,
    answer: type[T],
    ship: bool = False,
    timeout: float | None = 60.0,
    limit: int = protocol.MAX_REPLY,
) -> dict[int, T]:
    """Run a step on every node at once and return the answers by node; the first failure is raised."""
    return runner.each(
        lambda node: call(
            runner,
            node,
            verb,
            *arguments(node),
            answer=answer,
            ship=ship,
            timeout=timeout,
            limit=limit,
        )
    ).all()
