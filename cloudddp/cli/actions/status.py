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
from cloudddp.cluster.lookup import OrphanedResources
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.node_addresses import in_parallel
from cloudddp.cluster.region_search import Search
from cloudddp.errors import AWSError, CloudDDPError, Message
from cloudddp.formats import credentials_end, region_list


def status(console: Console, *, as_json: bool, watch: bool) -> None:
    if watch:
        from cloudddp.cli.actions.top import top  # with all that connects to nodes

        top(console, as_json=as_json, once=False)
        return
    session = start_session(console, tolerant_verb="status")
    name, aws = session.settings.cluster.name, session.account.aws()
    found = lookup.find(aws, name)
    live = [c for c in found if c.live]
    if not live:
        try:
            aws, live = _elsewhere(console, session, aws, lookup.last_ended(found))
        except CloudDDPError:
            if as_json:
                console.print_json([])
            raise
    ownership = session.account.ownership(aws)
    for one in live:
        session.account.warn_of(one)
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
    """Return the cluster in another region. Raises CloudDDPError if there is none, and
    shows before what is left here."""
    name = session.settings.cluster.name
    left = _remains(console, aws, [], name)
    for one in left:
        console.log(views.remains_text(one))
    hint: str = Message("`cloudddp up` creates it; `cloudddp ls` lists all clusters")
    if left:
        hint = Message("`cloudddp down` removes what is left of it")
    what = f"cluster {name!r} has no nodes" if left else f"there is no cluster {name!r}"
    aws = session.account.relocated(aws, lookup.NoCluster(f"{what} in {aws.region}", hint=hint, last=last))
    return aws, [c for c in lookup.find(aws, name) if c.live]


def ls(console: Console, *, as_json: bool, all_regions: bool) -> None:
    session = start_session(console, tolerant_verb="ls")
    found = region_search.ask(session.account.listed_in(all_regions=all_regions))
    left = _all_remains(console, found)
    chosen = all_regions or session.options.region
    if found.answers and not (found.every or any(left.values()) or chosen):
        rest = region_search.rest(next(iter(found.answers)), found.regions)
        found, left = found.merged(rest), left | _all_remains(console, rest)
    orphans = [orphan for remains in left.values() for orphan in remains]
    for cluster in found.every:
        session.account.warn_of(cluster)
    if as_json:
        entries: list[dict[str, Any]] = []
        for aws, remains in left.items():
            ownership, credentials = session.account.ownership(aws), aws.credentials.ends()
            entries += [views.cluster_json(c, ownership, credentials) for c in found.live(aws)]
            entries += [views.remains_json(orphan, ownership) for orphan in remains]
        console.print_json(entries)
    else:
        if found.every:
            console.print(views.clusters_table(found.every))
        for orphan in orphans:
            console.log(views.remains_text(orphan))
        if found.answers and not found.every and not orphans:
            console.log(f"no clusters in {region_list(found.regions)}")
    _report_unanswered(console, session, found)


def _all_remains(console: Console, found: Search) -> dict[AWS, list[OrphanedResources]]:
    """Return what is left of clusters without nodes, for each region that has answered."""
    calls = [partial(_remains, console, aws, found.live(aws)) for aws in found.answers]
    return dict(zip(found.answers, in_parallel(calls), strict=True))


def _report_unanswered(console: Console, session: Session, found: Search) -> None:
    """Report regions that were not asked. Raises CloudDDPError if none or not all configured ones were."""
    for region, error in found.failed.items():
        refused = isinstance(error, AWSError) and error.code in REGION_REFUSED
        if not found.answers or (region in session.account.configured and not refused):
            raise error
        console.warn(f"{region} could not be asked: {error.message}")


def _remains(
    console: Console, aws: AWS, live: list[Cluster], name: str | None = None
) -> list[OrphanedResources]:
    """Return what is left of clusters without nodes. A caller who may list instances only gets a warning."""
    try:
        return lookup.remains(aws, live, name)
    except AWSError as error:
        if error.code not in DENIED:
            raise
        console.warn(f"what is left of clusters without nodes is not shown: {error.message}")
        return []
