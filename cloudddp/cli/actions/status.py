"""`status` and `ls`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.aws.denials import CODES as DENIED
from cloudddp.cli import ends
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.formats import credentials_end
from cloudddp.cli.session import Session
from cloudddp.cli.views import clusters as views
from cloudddp.cluster import inspect
from cloudddp.cluster.inspect import Remains
from cloudddp.cluster.model import Cluster
from cloudddp.config.options import GlobalOptions
from cloudddp.errors import AWSError, CloudDDPError, Command, parts


def status(console: Console, options: GlobalOptions, *, as_json: bool) -> None:
    session = sessions.start(console, options)
    name, aws = session.settings.cluster.name, session.aws()
    found = inspect.find(aws, name)
    live, ownership = [c for c in found if c.live], session.ownership(aws)
    _warn(console, live)
    credentials = aws.credentials_end()
    if as_json:
        console.print_json([views.cluster_json(c, ownership, credentials, ends.planned(c)) for c in live])
    elif live:
        console.print("\n\n".join(views.cluster(c, ownership, ends.planned(c)) for c in live))
        if any(ends.planned(c) for c in live):
            console.log(Command("jobs"), " shows when the nodes end because of --down")
        if ending := credentials_end(credentials):
            console.print(f"\nyour AWS {ending}")
    if not live:
        left = _remains(console, aws, live, name)
        for one in left:
            console.log(*parts(views.remains_text(one)))
        before = ends.explanation(name, aws.endpoint, inspect.last_ended(found))
        before = f"; {before}" if before else ""
        if left:
            raise CloudDDPError(
                f"cluster {name!r} has no nodes in {aws.region}{before}",
                hint=(Command("down"), " removes what is left of it"),
            )
        raise CloudDDPError(
            f"there is no cluster {name!r} in {aws.region}{before}",
            hint=(Command("up"), " creates it; ", Command("ls"), " lists all clusters"),
        )


def ls(console: Console, options: GlobalOptions, *, as_json: bool) -> None:
    session = sessions.start(console, options)
    clouds = session.clouds()
    by_region, left = {}, {}
    for aws in (*clouds, *session.recorded_clouds(clouds)):
        try:
            by_region[aws] = [c for c in inspect.find(aws) if c.live]
            left[aws] = _remains(console, aws, by_region[aws])
        except AWSError as error:
            if aws in clouds:
                raise
            console.warn(
                f"{aws.region}, where this computer created a cluster, could not be asked: {error.message}"
            )
    found = [cluster for clusters in by_region.values() for cluster in clusters]
    without_nodes = [one for remains in left.values() for one in remains]
    _warn(console, found)
    if as_json:
        console.print_json(
            [entry for aws in by_region for entry in _json(session, aws, by_region[aws], left.get(aws, []))]
        )
        return
    if found:
        console.print(views.clusters_table(found))
    for one in without_nodes:
        console.log(*parts(views.remains_text(one)))
    if not found and not without_nodes:
        console.log(f"no clusters in {', '.join(aws.region for aws in by_region)}")


def _remains(console: Console, aws: AWS, live: list[Cluster], name: str | None = None) -> list[Remains]:
    """Return what is left of clusters without nodes. A caller who may list instances only gets a warning."""
    try:
        return inspect.remains(aws, live, name)
    except AWSError as error:
        if error.code not in DENIED:
            raise
        console.warn(f"what is left of clusters without nodes is not shown: {error.message}")
        return []


def _json(session: Session, aws: AWS, live: list[Cluster], left: list[Remains]) -> list[dict[str, Any]]:
    ownership = session.ownership(aws)
    clusters = [views.cluster_json(c, ownership, aws.credentials_end(), ends.planned(c)) for c in live]
    return clusters + [views.remains_json(one, ownership) for one in left]


def _warn(console: Console, found: Iterable[Cluster]) -> None:
    for text in (text for cluster in found for text in cluster.warnings):
        console.warn(text)
