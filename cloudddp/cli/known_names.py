"""What the shell completes: names of clusters, jobs and nodes that this computer knows. Only local state is
read: completion must not wait for the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem

from cloudddp import local_state
from cloudddp.cli.lazy_commands import given_options

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completing(names: Callable[[click.Context], Sequence[str]]) -> Complete:
    def complete(ctx: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(name) for name in names(ctx) if name.startswith(begun)]
        except Exception:  # an error would be printed into the line that is being typed
            return []

    return complete


def _clusters(_: click.Context) -> list[str]:
    return sorted({record.name for record in local_state.known_clusters()})


def _folders(ctx: click.Context) -> list[local_state.ClusterFolder]:
    chosen = given_options(ctx).cluster
    known = [one for one in local_state.known_clusters() if chosen in (None, one.name)]
    return [local_state.ClusterFolder(one.id) for one in known]


def _jobs(ctx: click.Context) -> list[str]:
    return sorted(job for folder in _folders(ctx) for job in folder.jobs())


def _nodes(ctx: click.Context) -> list[str]:
    launches = [json.loads(folder.read(folder.launch) or "{}") for folder in _folders(ctx)]
    counts = [int(one.get("MaxCount", 0)) for one in launches]
    return [str(node) for node in range(min(max(counts, default=0), 1000))]


clusters, jobs, nodes = _completing(_clusters), _completing(_jobs), _completing(_nodes)


def files(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Leave it to the shell, which completes files."""
    return [CompletionItem(begun, type="file")]
