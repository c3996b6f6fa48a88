"""Talking to the agent on the nodes: ship it, call a step of it on one node or on all, read its answer.

A `Runner` carries commands to nodes: the SSH fleet, or the stand-in of a rehearsal. One command a step, however
much the step does, since each is a round trip. What the steps mean is the business of cluster.py and job.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cloudddp import payload
from cloudddp.errors import NodeError
from cloudddp.ssh.connection import Result
from cloudddp.ssh.fleet import Outcome

T = TypeVar("T")


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
    ) -> Result: ...

    def each(self, work: Callable[[int], T], *, fatal: Callable[[Exception], bool] = ...) -> Outcome[T]: ...

    def reconnect(self, node: int) -> None: ...

    def close(self) -> None: ...


@functools.cache
def agent_source() -> bytes:
    """Return the agent's program: read once, so that one command speaks to one agent throughout."""
    return payload.text("infra/node/agent.py").encode()


def agent_path() -> str:
    """Return the agent's path on a node; its content is in the name, so an old one is never run."""
    return f".cloudddp/agent-{hashlib.sha256(agent_source()).hexdigest()[:12]}.py"


def command(verb: str, *arguments: str) -> str:
    """Return the shell command of one step of the agent, which must be on the node already."""
    return f'exec python3 -I -X utf8 "$HOME"/{agent_path()} {shlex.join([verb, *arguments])}'


def shipping_command(verb: str, *arguments: str) -> str:
    """Return the command that takes the agent from stdin, puts it in place whole, and runs a step of it.

    One that is in place is left there: a node whose disk is full can still be asked.
    """
    path = f'"$HOME"/{agent_path()}'
    return (
        'umask 077; mkdir -p "$HOME"/.cloudddp && '
        f"if [ -s {path} ]; then cat > /dev/null; else cat > {path}.$$ && mv {path}.$$ {path}; fi && "
        f"{command(verb, *arguments)}"
    )


def call(
    runner: Runner,
    node: int,
    verb: str,
    *arguments: str,
    stdin: bytes | Iterable[bytes] | None = None,
    ship: bool = False,
    timeout: float | None = 60.0,
) -> Any:
    """Run a step on one node and return its JSON answer. Raises NodeError with the node's own words."""
    text = shipping_command(verb, *arguments) if ship else command(verb, *arguments)
    result = runner.run(node, text, stdin=agent_source() if ship else (stdin or b""), command_timeout=timeout)
    if result.exit_code:
        raise NodeError(f"node {node}: step {verb!r} failed: {last_words(result)}")
    try:
        return json.loads(result.stdout.strip().splitlines()[-1])  # a .bashrc may have spoken before
    except (ValueError, IndexError):
        raise NodeError(f"node {node}: step {verb!r} gave no answer: {last_words(result)}") from None


def last_words(result: Result) -> str:
    """Return the last line that a command wrote, or its exit code where it wrote nothing."""
    lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {result.exit_code}"


def call_all(
    runner: Runner,
    verb: str,
    arguments: Callable[[int], Sequence[str]] = lambda _: (),
    *,
    stdin: Mapping[int, bytes] | None = None,
    ship: bool = False,
    timeout: float | None = 60.0,
) -> dict[int, Any]:
    """Run a step on every node at once and return the answers by node; the first failure is raised."""
    return runner.each(
        lambda node: call(
            runner,
            node,
            verb,
            *arguments(node),
            stdin=stdin[node] if stdin else None,
            ship=ship,
            timeout=timeout,
        )
    ).all()
