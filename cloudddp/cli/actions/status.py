"""`status`, `ls` and `allow-me`."""

from __future__ import annotations

from collections.abc import Iterable

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.formats import credentials_end
from cloudddp.cli.views import clusters as views
from cloudddp.cluster import access, inspect
from cloudddp.cluster.model import Cluster
from cloudddp.config.options import GlobalOptions
from cloudddp.errors import CloudDDPError, Command


def status(console: Console, options: GlobalOptions, *, as_json: bool) -> None:
    session = sessions.start(console, options)
    name, aws = session.settings.cluster.name, session.aws()
    found = inspect.find(aws, name)
    live, ownership = [c for c in found if c.live], session.ownership(aws)
    _warn(console, live)
    ends = aws.credentials_end()
    if as_json:
        console.print_json([views.cluster_json(c, ownership, ends) for c in live])
    elif live:
        console.print("\n\n".join(views.cluster(c, ownership) for c in live))
        if ending := credentials_end(ends):
            console.print(f"\nyour AWS {ending}")
    if not live:
        last = max((c for c in found if c.ended), key=lambda c: (c.ended, c.id), default=None)
        before = f"; the last one, {last.id}, ended {views.at(last.ended)}" if last else ""
        raise CloudDDPError(
            f"there is no cluster {name!r} in {aws.region}{before}",
            hint=(Command("up"), " creates it; ", Command("ls"), " lists all clusters"),
        )


def ls(console: Console, options: GlobalOptions, *, as_json: bool) -> None:
    session = sessions.start(console, options)
    by_region = {aws: [c for c in inspect.find(aws) if c.live] for aws in session.clouds()}
    found = [cluster for clusters in by_region.values() for cluster in clusters]
    _warn(console, found)
    if as_json:
        console.print_json(
            [
                views.cluster_json(c, ownership, aws.credentials_end())
                for aws, mine in by_region.items()
                for ownership in [session.ownership(aws)]
                for c in mine
            ]
        )
    elif found:
        console.print(views.clusters_table(found))
    else:
        console.log("no clusters")


def allow_me(console: Console, options: GlobalOptions, *, anyone: bool) -> None:
    session = sessions.start(console, options, anyone=anyone)
    aws, spec = session.aws(), session.settings.cluster
    block = access.allow_caller(aws, spec, ownership=session.ownership(aws))
    console.print(f"SSH to cluster {spec.name} is allowed from {block}")


def _warn(console: Console, found: Iterable[Cluster]) -> None:
    for text in (text for cluster in found for text in cluster.warnings):
        console.warn(text)
