"""What the shell completes: names of clusters, jobs and nodes in local state, without the network."""

from __future__ import annotations

import json

import click
from click.shell_completion import CompletionItem

from cloudddp import local_state
from cloudddp.cli.lazy_commands import given_options


def complete(kind: str, ctx: click.Context, begun: str) -> list[CompletionItem]:
    """Return the names of a kind that begin so; files are left to the shell, which completes them."""
    if kind == "files":
        return [CompletionItem(begun, type="file")]
    try:
        return [CompletionItem(name) for name in _names(kind, ctx) if name.startswith(begun)]
    except Exception:  # an error would be printed into the line that is being typed
        return []


def _names(kind: str, ctx: click.Context) -> list[str]:
    known = local_state.known_clusters()
    if kind == "clusters":
        return sorted({record.name for record in known})
    chosen = given_options(ctx).cluster
    folders = [local_state.ClusterFolder(one.id) for one in known if chosen in (None, one.name)]
    if kind == "jobs":
        return sorted(job for folder in folders for job in folder.jobs())
    launches = [json.loads(folder.read(folder.launch) or "{}") for folder in folders]
    counts = [int(launch.get("MaxCount", 0)) for launch in launches]
    return [str(node) for node in range(min(max(counts, default=0), 1000))]
