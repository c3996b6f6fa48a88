"""`exec` and `ssh`."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from cloudddp import timings
from cloudddp.agent.client import Runner
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cluster import connect
from cloudddp.cluster.connect import PROJECT
from cloudddp.config import timing
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Command, UsageError
from cloudddp.files import write_atomic
from cloudddp.job.follow.lines import LineSplitter
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.node_connections import connected
from cloudddp.ssh.running import CommandSpec
from cloudddp.text import without_colours

_WITH_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"  # options of OpenSSH's `ssh`
_LOST_KEEPALIVES = 120  # until a session ends: half an hour, in which a laptop may sleep


def exec_(
    console: Console, options: GlobalOptions, *, anyone: bool, node: int | None, command: Sequence[str]
) -> int:
    session = sessions.start(console, options, anyone=anyone)
    text = command[0] if len(command) == 1 else shlex.join(command)
    inside = f'cd "$HOME"/{PROJECT} 2>/dev/null || cd; {text}'
    with connected(session, partly=node is not None, needed=None if node is None else [node]) as (
        cluster,
        runner,
    ):
        if node is not None:
            cluster.require_node(node)
        ranks = cluster.nodes if node is None else [node]
        lock = threading.Lock()
        try:
            outcome = runner.each(
                lambda rank: _execute(console, runner, rank, inside, lock), nodes=ranks, fatal=lambda _: False
            )
        except KeyboardInterrupt:
            console.log(
                "commands that write nothing may still run on the nodes: ", Command("exec", "--", "ps ux")
            )
            raise
    for rank, code in sorted(outcome.values.items()):
        if code:
            console.log(f"node {rank}: exit code {code}")
    return max(outcome.all().values(), default=0)


def _execute(console: Console, runner: Runner, node: int, command: str, lock: threading.Lock) -> int:
    """Run a command on a node, which may last, and return its exit code; print each line as soon as it is
    complete, one node at a time."""
    out, err = LineSplitter(), LineSplitter()

    def show_out(data: bytes, *, last: bool = False) -> None:
        with lock:
            for line in out.feed(data, last=last):
                console.print_raw(f"[node {node}] {line}")

    def show_err(data: bytes, *, last: bool = False) -> None:
        with lock:
            for line in err.feed(data, last=last):
                console.print(without_colours(f"[node {node}] {line}"), err=True)

    spec = CommandSpec(command, command_timeout=None, on_stdout=show_out, on_stderr=show_err, until_exit=True)
    with timings.span("command", node):
        try:
            return runner.run(node, spec).exit_code
        finally:
            show_out(b"", last=True)
            show_err(b"", last=True)


def ssh(console: Console, options: GlobalOptions, *, anyone: bool, words: Sequence[str]) -> None:
    given, node, command = _ssh_words(words)
    session = sessions.start(console, options, anyone=anyone)
    cluster, spec = session.cluster(), session.settings.cluster
    cluster.require_node(node)
    program = shutil.which("ssh")
    if program is None:
        raise CloudDDPError(
            "OpenSSH's `ssh` is not installed",
            hint=("install openssh-client, or use ", Command("exec"), ", which does not need it"),
        )
    connect.complete_host_keys(cluster, spec, progress=console.log)
    targets, lost = connect.targets(cluster, spec)
    if node in lost:
        raise lost[node]
    target = targets[node]
    target.require_host_key()
    known = ClusterFolder(cluster.id).known_hosts
    write_atomic(known, "".join(f"{t.known_as} {key}\n" for t in targets.values() for key in t.host_keys))
    settings = [
        "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={_ssh_config_value(known)}",
        "GlobalKnownHostsFile=none",
        f"IdentityFile={_ssh_config_value(target.private_key)}",
        "IdentitiesOnly=yes",
        # So that the idle guard of the node can tell a quiet session from a computer that has vanished.
        f"ServerAliveInterval={max(round(timing.current().keepalive), 1)}",
        f"ServerAliveCountMax={_LOST_KEEPALIVES}",
        *target.route.openssh_options(target),
    ]
    # -F none: a `ForwardAgent yes` for every host would lend the user's keys to the node, which is not
    # trusted.
    argv = [program, "-F", "none", "-p", str(target.port)]
    argv += [word for setting in settings for word in ("-o", setting)]
    console.print_timings()  # until here: OpenSSH takes the place of this process
    os.execv(program, [*argv, *given, f"{target.user}@{target.host}", *command])  # noqa: S606  no shell


def _ssh_words(words: Sequence[str]) -> tuple[Sequence[str], int, Sequence[str]]:
    """Return the options for OpenSSH before the node, the node (0 if it is not given), and what follows it.
    Raises UsageError."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        letters = words[at][1:]
        first = next((index for index, letter in enumerate(letters) if letter in _WITH_VALUE), None)
        at += 2 if first == len(letters) - 1 else 1  # the next word is its value, unless that is attached
    node = words[at] if at < len(words) else "0"
    if not (node.isascii() and node.isdigit()):
        raise UsageError(
            f"not a node number: {node!r}", hint=("for example: ", Command("ssh", "0", "--", node))
        )
    return words[:at], int(node), words[at + 1 :]


def _ssh_config_value(path: Path) -> str:
    """Return a path as OpenSSH reads it in an option: it splits values at spaces and expands `%`."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
