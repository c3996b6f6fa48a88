"""`cost`: what each cluster has cost, by month and project."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from cloudddp import local_state
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cli.views import costs as views
from cloudddp.cluster import costs, region_search


def cost(console: Console, *, as_json: bool) -> None:
    session = start_session(console, tolerant_verb="cost")
    clouds = session.account.listed_in(all_regions=False)
    asked = region_search.ask(clouds)
    if asked.failed:
        console.warn(f"{asked.unanswered()} could not be asked; using what this computer has recorded")
    mine = {aws: session.account.ownership(aws).mine for aws in asked.answers}
    listed = [
        one for aws, own in mine.items() for one in asked.answers[aws] if all(map(own, one.live or one.gone))
    ]
    found = costs.collect(local_state.history(clouds[0].endpoint), listed, datetime.now(UTC))
    if as_json:
        console.print_json([asdict(one) for one in found])
    elif found:
        console.print(views.costs_text(found))
        console.log("list prices, also of simulated nodes; without data transfer, snapshots and taxes")
    else:
        console.log("no clusters are known")
