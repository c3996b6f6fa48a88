"""`forward` and `tensorboard`: ports of this computer that lead to programs on a node."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import webbrowser
from collections.abc import Iterator, Sequence

from cloudddp import signals
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import ProbeRequest
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cluster import connect
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import CloudDDPError, NodeError, UsageError, q
from cloudddp.job import status
from cloudddp.job import tensorboard as boards
from cloudddp.operations.node_connections import connected, reachable
from cloudddp.ssh.connection import LOOPBACK, Connection
from cloudddp.ssh.forward import Forward
from cloudddp.text import one_line, reason_of

_POLL = 0.2  # seconds
_PORTS = re.compile(r"([0-9]{1,5})(?::([0-9]{1,5}))?")


def forward(console: Console, *, node: int, ports: Sequence[str]) -> None:
    forwards = [_listening(port) for port in ports]  # first: the session may enter the simulator's network
    session = start_session(console)
    with connected(session, only=node) as (_, runner), _until_interrupted(console):
        connection = _serve(console, forwards, runner, node)
        for one in forwards:
            console.print(f"http://{LOOPBACK}:{one.local} is port {one.remote} of node {node}")
        console.log("Ctrl-C ends this")
        while connection.is_open:
            time.sleep(_POLL)
        hint = f"repeat `cloudddp forward {q(*ports)} --node {q(node)}`"
        raise NodeError(f"{connection.target.label}: the SSH connection broke", hint=hint)


def _listening(given: str) -> Forward:
    """Listen on LOCAL of LOCAL or LOCAL:REMOTE. Raises UsageError."""
    found = _PORTS.fullmatch(given)
    local, remote = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not (0 < local < 1 << 16 and 0 < remote < 1 << 16):
        hint = "give LOCAL or LOCAL:REMOTE, each from 1 to 65535"
        raise UsageError(f"not a port: {one_line(given, 50)!r}", hint=hint)
    try:
        return Forward(local, remote)
    except OSError as error:
        text = f"cannot listen on port {local} of this computer: {reason_of(error)}"
        raise UsageError(text, hint=f"give another one: LOCAL:{remote}") from None


def _serve(console: Console, forwards: Sequence[Forward], runner: Runner, node: int) -> Connection:
    """Begin to forward, if all can; return the connection to the node."""
    connection = runner.connection(node)
    assert connection is not None  # noqa: S101  only a dry run has none
    for one in forwards:
        if one.local == one.remote and connection.target.host.startswith("127."):
            same = f"the simulator's process nodes share this computer's ports: {one.local} would lead to "
            raise UsageError(f"{same}itself", hint=f"give another one: LOCAL:{one.remote}")
    for one in forwards:
        text = f"port {one.remote} of node {node} does not answer; does a program listen there yet?"

        def report(reason: str, text: str = text) -> None:
            console.log(f"{text} {reason}")

        one.start(connection, report)
    return connection


@contextlib.contextmanager
def _until_interrupted(console: Console) -> Iterator[None]:
    """Take Ctrl-C as the end of the block, and no failure."""
    try:
        yield
    except signals.Terminated:
        raise
    except KeyboardInterrupt:
        console.log("ended")


def tensorboard(console: Console, *, job_id: str | None, browse: bool) -> None:
    one = Forward()
    session = start_session(console)
    job = session.settings.job
    with reachable(session, required=()) as (cluster, runner), _until_interrupted(console):
        record = status.find_job(runner, job_id)
        node = min(runner.nodes) if record.rank_zero is None else record.rank_zero
        runner.leave_out([other for other in runner.nodes if other != node])  # they may be idle, and end
        logs = boards.find_logs(runner, node, PROJECT, job.outputs or (".",))
        if not logs:
            hint = f"does the script write into {' or '.join(job.outputs) or 'the project'}?"
            raise CloudDDPError(f"node {node} has no event files of TensorBoard", hint=hint)
        python = connect.probe(runner, cluster, ProbeRequest(PROJECT, "", job.python, only_files=True))[
            node
        ].python

        def browse_to(url: str) -> None:
            if not webbrowser.open(url):
                console.log("there is no browser to open here: open the URL yourself")

        def show(remote: int) -> None:
            one.remote, url = remote, f"http://{LOOPBACK}:{one.local}"
            _serve(console, [one], runner, node)
            console.print(url)
            if browse:  # in a thread: it may return when the browser is closed
                threading.Thread(target=browse_to, args=(url,), daemon=True).start()

        console.log(f"starting TensorBoard on node {node} for {logs}; Ctrl-C ends it")
        boards.run(runner, node, python, f"{PROJECT}/{logs}", show)
