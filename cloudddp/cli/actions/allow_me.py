"""`allow-me`."""

from __future__ import annotations

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cluster import lookup, ssh_ingress
from cloudddp.config.command_line import GlobalOptions


def allow_me(console: Console, options: GlobalOptions, *, anyone: bool) -> None:
    session = start_session(console, options, anyone=anyone)
    aws, spec = session.aws(), session.settings.cluster
    try:
        block = ssh_ingress.allow_caller(aws, spec, session.ownership(aws))
    except lookup.NoCluster as error:
        aws = session.relocated(aws, error)
        block = ssh_ingress.allow_caller(aws, spec, session.ownership(aws))
    console.print(f"SSH to cluster {spec.name} is allowed from {block}")
