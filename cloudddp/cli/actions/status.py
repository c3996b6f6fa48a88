"""`status` and `ls`."""

from __future__ import annotations

from functools import partial
from typing import Any

from cloudddp.aws.answers import REGION_REFUSED
from cloudddp.aws.client import AWS
from cloudddp.aws.denials import CODES as DENIED
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views import clusters as views
from cloudddp.cluster import lookup, nodes_end, region_search
from cloudddp.cluster.lookup import Remains
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.node_addresses import in_parallel
from cloudddp.cluster.region_search import Search
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import AWSError, CloudDDPError, Message
from cloudddp.formats import credentials_end, region_list


def status(console: Console, options: GlobalOptions, *, as_json: bool, watch: bool) -> None:
    if watch:
        from cloudddp.cli.actions.top import top  # with all that connects to nodes

        top(console, options, anyone=False, as_json=as_json, once=False)
        return
    session = start_session(console, options, tolerant_verb="status")
    name, aws = session.settings.cluster.name, session.aws()
    found = lookup.find(aws, name)
    live = [c for c in found if c.live]
    if not live:
        try:
            aws, live = _elsewhere(console, session, aws, lookup.last_ended(found))
        except CloudDDPError:
            if as_json:
                console.print_json([])
            raise
    ownership = session.ownership(aws)
    for one in live:
        session.warn_of(one)
    credentials = aws.credentials.ends()
    if as_json:
        console.print_json([views.cluster_json(c, ownership, credentials) for c in live])
        return
    console.print_text("\n\n".join(views.cluster(c, ownership) for c in live))
    asked = "; `cloudddp jobs` asks them when they end" if any(nodes_end.planned(c.id) for c in live) else ""
    console.suggest(f"`cloudddp down` ends the nodes now{asked}")
    if ending := credentials_end(credentials):
        console.print(f"\nyour AWS {ending}")


def _elsewhere(
    console: Console, session: Session, aws: AWS, last: Cluster | None
) -> tuple[AWS, list[Cluster]]:
    """Return the cluster in another region; raise CloudDDPError, after what is left of it in this one, if it
    is in none."""
    name = session.settings.cluster.name
    left = _remains(console, aws, [], name)
    for one in left:
        console.log(views.remains_text(one))
    hint: str = Message("`cloudddp up` creates it; `cloudddp ls` lists all clusters")
    if left:
        hint = Message("`cloudddp down` removes what is left of it")
    what = f"cluster {name!r} has no nodes" if left else f"there is no cluster {name!r}"
    aws = session.relocated(aws, lookup.NoCluster(f"{what} in {aws.region}", hint=hint, last=last))
    return aws, [c for c in lookup.find(aws, name) if c.live]


def ls(console: Console, options: GlobalOptions, *, as_json: bool, all_regions: bool) -> None:
    session = start_session(console, options, tolerant_verb="ls")
    found = region_search.ask(session.listed_in(all_regions=all_regions))
    left = _all_remains(console, found)
    if found.answers and not found.every and not any(left.values()) and not (all_regions or options.region):
        rest = region_search.rest(next(iter(found.answers)), found.regions)
        found, left = found.merged(rest), left | _all_remains(console, rest)
    without_nodes = [one for remains in left.values() for one in remains]
    for cluster in found.every:
        session.warn_of(cluster)
    if as_json:
        console.print_json(
            [entry for aws in left for entry in _json(session, aws, found.live(aws), left[aws])]
        )
    else:
        if found.every:
            console.print(views.clusters_table(found.every))
        for one in without_nodes:
            console.log(views.remains_text(one))
        if found.answers and not found.every and not without_nodes:
            console.log(f"no clusters in {region_list(found.regions)}")
    _report_unanswered(console, session, found)


def _all_remains(console: Console, found: Search) -> dict[AWS, list[Remains]]:
    """Return what is left of clusters without nodes, for each region that has answered."""
    calls = [partial(_remains, console, aws, found.live(aws)) for aws in found.answers]
    return dict(zip(found.answers, in_parallel(calls), strict=True))


def _report_unanswered(console: Console, session: Session, found: Search) -> None:
    """Report the regions that could not be asked. Raises CloudDDPError if none has answered, or a configured
    one has not."""
    for region, error in found.failed.items():
        refused = isinstance(error, AWSError) and error.code in REGION_REFUSED
        if not found.answers or (region in session.configured and not refused):
            raise error
        console.warn(f"{region} could not be asked: {error.message}")


def _remains(console: Console, aws: AWS, live: list[Cluster], name: str | None = None) -> list[Remains]:
    """Return what is left of clusters without nodes. A caller who may list instances only gets a warning."""
    try:
        return lookup.remains(aws, live, name)
    except AWSError as error:
        if error.code not in DENIED:
            raise
        console.warn(f"what is left of clusters without nodes is not shown: {error.message}")
        return []


def _json(session: Session, aws: AWS, live: list[Cluster], left: list[Remains]) -> list[dict[str, Any]]:
    ownership = session.ownership(aws)
    clusters = [views.cluster_json(c, ownership, aws.credentials.ends()) for c in live]
    return clusters + [views.remains_json(one, ownership) for one in left]
