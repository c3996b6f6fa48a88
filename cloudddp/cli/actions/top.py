"""`top` and `status --watch`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from datetime import UTC, datetime

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console, live_lines
from cloudddp.cli.views import top as views
from cloudddp.cli.views.top import Snapshot
from cloudddp.config import timing
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Command, NodeError
from cloudddp.formats import width_of
from cloudddp.job.readings import ClusterReadings
from cloudddp.ssh.connection import paramiko_loaded_meanwhile
from cloudddp.text import node_list

REFRESH = 0.5  # seconds between two states of a terminal


def top(
    console: Console,
    options: GlobalOptions,
    *,
    anyone: bool = False,
    as_json: bool = False,
    once: bool = False,
    interval: float = 2.0,
) -> None:
    session = sessions.start(console, options, anyone=anyone)
    cluster = session.cluster(meanwhile=paramiko_loaded_meanwhile)
    readings = ClusterReadings(cluster, session.settings.cluster, interval)

    def view() -> Snapshot:
        now, clock = time.time(), time.monotonic()
        return Snapshot(readings.cluster, readings.nodes, interval, now, clock, readings.problem)

    def write(now: Snapshot) -> None:
        at = [] if once else [f"{datetime.fromtimestamp(now.now, UTC):%Y-%m-%d %H:%M:%S} UTC"]
        plain = [*at, *(text for text, _ in views.lines(now, width_of(sys.stdout)))]
        for text in [json.dumps(views.top_json(now))] if as_json else plain:
            console.print(text)

    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not as_json and not once
    with closing(readings):
        # A question for a code would be in the middle of the table.
        readings.start(lambda: session.aws(finishing=True))
        try:
            if not live:
                _wait_for_all(view)
            with live_lines() if live else nullcontext() as show:
                while view().cluster.nodes:
                    write(now := view()) if show is None else show(_on_terminal(view()))
                    if once:
                        _check(now)
                        return
                    time.sleep(REFRESH if live else interval)
        except KeyboardInterrupt as interrupt:
            if once or type(interrupt) is not KeyboardInterrupt:  # SIGTERM, or the terminal was closed
                raise
            return
    console.log(f"cluster {cluster.name} has no nodes any more")


def _wait_for_all(view: Callable[[], Snapshot]) -> None:
    """Wait until every node has sent something, or does not answer."""
    deadline = time.monotonic() + 2 * timing.current().connect
    while time.monotonic() < deadline and views.CONNECTING in map((now := view()).state, now.ranks):
        time.sleep(0.05)


def _check(view: Snapshot) -> None:
    """Raise NodeError if nothing was read from a node."""
    if silent := [node for node in view.ranks if view.state(node) != views.READY]:
        hint = (Command("status"), " shows what AWS reports")
        raise NodeError(f"there are no readings of {node_list(silent)}", hint=hint)


def _on_terminal(view: Snapshot) -> list[views.Line]:
    try:
        views.BLOCKS.encode(sys.stdout.encoding)
        blocks = views.BLOCKS
    except UnicodeEncodeError:
        blocks = views.ASCII
    height = os.get_terminal_size(sys.stdout.fileno()).lines
    return views.lines(view, width_of(sys.stdout), height - 1, blocks)
