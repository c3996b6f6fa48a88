"""`allow-me`."""

from __future__ import annotations

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cluster import lookup, ssh_ingress


def allow_me(console: Console) -> None:
    session = start_session(console)
    aws, spec = session.account.aws(), session.settings.cluster
    try:
        block = ssh_ingress.allow_caller(aws, spec, session.account.ownership(aws))
    except lookup.NoCluster as error:
        aws = session.account.relocated(aws, error)
        block = ssh_ingress.allow_caller(aws, spec, session.account.ownership(aws))
    console.print(f"SSH to cluster {spec.name} is allowed from {block}")
