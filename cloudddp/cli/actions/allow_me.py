"""`allow-me`."""

from __future__ import annotations

from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cluster import lookup, ssh_ingress
from cloudddp.config.command_line import GlobalOptions


def allow_me(console: Console, options: GlobalOptions, *, anyone: bool) -> None:
    session = sessions.start(console, options, anyone=anyone)
    aws, spec = session.aws(), session.settings.cluster
    try:
        block = ssh_ingress.allow_caller(aws, spec, ownership=session.ownership(aws))
    except lookup.NoCluster as error:
        aws = session.relocated(aws, error)
        block = ssh_ingress.allow_caller(aws, spec, ownership=session.ownership(aws))
    console.print(f"SSH to cluster {spec.name} is allowed from {block}")
