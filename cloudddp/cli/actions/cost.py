"""`cost`: what each cluster has cost, by month and project."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime

from cloudddp import local_state
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cli.views import costs as views
from cloudddp.cluster import costs, region_search
from cloudddp.cluster.model import Cluster
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, UsageError

_MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")


def cost(console: Console, options: GlobalOptions, *, month: str | None, as_json: bool) -> None:
    if month is not None and not _MONTH.fullmatch(month):
        raise UsageError(f"--month: {month!r} is not a month", hint="for example 2026-11")
    session = sessions.start(console, options, tolerant_verb="cost")
    endpoint, listed = _listed(session)
    found = costs.collect(local_state.history(endpoint), listed, datetime.now(UTC))
    shown = [one for one in found if month in (None, one.month)]
    if as_json:
        console.print_json([views.cost_json(one) for one in shown])
        return
    if not shown:
        console.log("no clusters are known" + (f" of {month}" if month else ""))
        return
    console.print(views.costs_text(shown))
    console.log(
        "estimates by list prices, with disks and addresses; not counted: data transfer, snapshots, taxes"
    )


def _listed(session: Session) -> tuple[str, list[Cluster]]:
    """Return the endpoint, and the caller's clusters that AWS lists, none where it cannot be asked."""
    endpoint, own = os.environ.get("AWS_ENDPOINT_URL", ""), list[Cluster]()
    try:
        clouds = session.listed_in(all_regions=False)
        endpoint, asked = clouds[0].endpoint, region_search.ask(clouds)
        for aws, clusters in asked.answers.items():
            mine = session.ownership(aws).mine
            own += [one for one in clusters if all(map(mine, one.live or one.gone))]
        problem = asked.unanswered()
    except CloudDDPError as error:
        problem = error.message
    if problem:
        session.console.warn(f"AWS could not be asked: {problem}; using what this computer has recorded")
    return endpoint, own
