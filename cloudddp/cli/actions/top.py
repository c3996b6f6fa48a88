"""`top` and `status --watch`."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext

from cloudddp import signals
from cloudddp.cli.console import Console, live_lines
from cloudddp.cli.session import start_session
from cloudddp.cli.views import top as views
from cloudddp.cli.views.jobs import iso
from cloudddp.config import timing
from cloudddp.formats import width_of
from cloudddp.job.readings import CONNECTING, ClusterReadings

REFRESH = 0.5  # seconds between two states of a terminal


def top(console: Console, *, as_json: bool, once: bool) -> None:
    session = start_session(console)
    cluster = session.account.cluster()
    # A question for a code would be in the middle of the table.
    readings = ClusterReadings(cluster, session.settings.cluster, lambda: session.account.aws(finishing=True))
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not as_json and not once
    try:
        while not live and CONNECTING in readings.snapshot().states.values():
            time.sleep(0.05)
        with live_lines() if live else nullcontext() as show:
            while (view := readings.snapshot()).cluster.nodes:
                if show is not None:
                    show(views.lines(view, width_of(sys.stdout)))
                elif as_json:
                    console.print(json.dumps(views.top_json(view)))
                else:
                    console.print("\n".join([iso(time.time()) or "", *views.lines(view)]))
                if once:
                    return
                time.sleep(REFRESH if live else timing.current().reading)
    except KeyboardInterrupt as interrupt:
        if once or isinstance(interrupt, signals.Terminated):
            raise
        return
    console.log(f"cluster {cluster.name} no longer has nodes")
