"""`exec`: a command on nodes, with this process's input, its output as it arrives, and its exit codes."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cluster.connect import PROJECT
from cloudddp.formats import table
from cloudddp.job.follow.lines import LineSplitter
from cloudddp.operations.node_connections import connected, reachable
from cloudddp.ssh import fleet
from cloudddp.ssh.running import CHUNK, CommandSpec
from cloudddp.text import node_list, without_colours

_PIECES = 4  # of the input, each of up to CHUNK bytes, that a node may be behind the fastest
_END_SECONDS = 20.0  # for a command to end after Ctrl-C


def exec_(console: Console, *, node: Collection[int], command: Sequence[str]) -> int:
    session = start_session(console)
    text = command[0] if len(command) == 1 else shlex.join(command)
    connections = reachable(session, required=node) if node else connected(session)
    with connections as (cluster, runner):
        for rank in node:
            cluster.require_node(rank)
        ranks = sorted(set(node) or cluster.nodes)
        is_one = len(ranks) == 1 and (node or not cluster.missing)
        work = _Execution(console, runner, text, ranks, prefixed=not is_one)
        runs = {rank: partial(work.run, rank) for rank in ranks}
        outcome = fleet.each(runs, fatal=lambda _: False, on_stop=work.end)
        if any(outcome.values.values()):
            rows = [(str(rank), str(code)) for rank, code in sorted(outcome.values.items())]
            console.print(table(("NODE", "EXIT CODE"), rows), err=True)
        return max(outcome.all().values(), default=0)


class _Execution:
    """A command that runs on nodes, and may last."""

    def __init__(
        self, console: Console, runner: Runner, text: str, ranks: Sequence[int], *, prefixed: bool
    ) -> None:
        """`prefixed`: each line begins with the node."""
        self._mark = secrets.token_hex(8)  # by which infra/node/end-exec.sh finds it
        self._command = f'export CLOUDDDP_EXEC={self._mark}; cd "$HOME"/{PROJECT} 2>/dev/null || cd; {text}'
        self._console, self._runner, self._prefixed = console, runner, prefixed
        self._lock = threading.Lock()
        # The input for each node on which the command has not ended.
        self._inputs = {rank: queue.Queue[bytes | None](_PIECES) for rank in ranks}
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, node: int) -> int:
        """Run it on a node and return its exit code; print each line as soon as it is complete."""
        label = f"[node {node}] " if self._prefixed else ""
        console, stdin = self._console, _pieces(self._inputs[node])

        def show(lines: LineSplitter, write: Callable[[str], None], data: bytes, last: bool = False) -> None:
            with self._lock:
                for line in lines.feed(data, last=last):
                    write(label + line)

        out = partial(show, LineSplitter(), console.print_raw)
        err = partial(show, LineSplitter(), lambda line: console.print(without_colours(line), err=True))
        spec = CommandSpec(self._command, stdin, None, on_stdout=out, on_stderr=err, until_exit=True)
        with timings.span("command", node):
            try:
                return self._runner.run(node, spec).exit_code
            finally:
                del self._inputs[node]
                out(b"", last=True)
                err(b"", last=True)

    def end(self) -> None:
        """End it on every node where it runs."""

        problem = "the command may still run"

        def end(node: int) -> None:
            words = "end-exec.sh", self._mark
            client.run_script(self._runner, node, *words, problem=problem, seconds=_END_SECONDS)

        if left := self._runner.each(end, nodes=list(self._inputs), fatal=lambda _: False).errors:
            self._console.warn(f"{problem} on {node_list(left)}")

    def _read(self) -> None:
        """Read this process's input for all nodes, no faster than the slowest of them takes it."""
        for data in _own_input():
            for node in list(self._inputs):
                while (pieces := self._inputs.get(node)) is not None:
                    with contextlib.suppress(queue.Full):
                        pieces.put(data, timeout=0.5)
                        break


def _own_input() -> Iterator[bytes | None]:
    """Yield this process's input, and None at its end. That of a terminal stays there: `ssh` is for that."""
    with contextlib.suppress(OSError):  # it is closed
        while not os.isatty(0) and (data := os.read(0, CHUNK)):
            yield data
    yield None


def _pieces(waiting: queue.Queue[bytes | None]) -> Iterator[bytes]:
    """Yield the input of a node, b"" while there is nothing yet."""
    while (piece := b"" if waiting.empty() else waiting.get()) is not None:
        yield piece
