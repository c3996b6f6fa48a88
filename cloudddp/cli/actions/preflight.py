"""`preflight`: the checks of a launch without a job, and the bandwidth between the nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from cloudddp.aws import instance_types
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cluster.model import Cluster
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Command
from cloudddp.formats import counted, table
from cloudddp.job import preflight as checks
from cloudddp.job.preflight import Measured
from cloudddp.operations.node_connections import connected
from cloudddp.text import size_of

SHOWN = 28  # pairs: all of eight nodes


def preflight(
    console: Console, options: GlobalOptions, *, anyone: bool, bandwidth: bool, as_json: bool
) -> int:
    session = sessions.start(console, options, anyone=anyone)
    with connected(session, whole=True) as (cluster, runner), console.progress() as progress:
        found = checks.run(runner, cluster, session.settings, bandwidth=bandwidth, progress=progress)
    gbits = _network(session, cluster) if bandwidth else 0.0
    slow = checks.slow_nodes([one for one in found if not one.whole])
    if as_json:
        shown = {"nodes": len(cluster.nodes), "instance_type": cluster.type, "network_gbits": gbits or None}
        console.print_json({**shown, "measured": msgspec.to_builtins(found), "slow_nodes": sorted(slow)})
    else:
        console.print(
            f"{counted(len(cluster.nodes), 'node')}: connected to each other, alike, without defects"
        )
        if found:
            console.print(f"\n{measured_table(found)}")
        if gbits:
            console.print(f"\n{cluster.type}: {gbits:g} Gbit/s, {gbits / 8:.1f} GB/s a node (EC2's figure)")
    for node, part in slow.items():
        console.fail(f"node {node} is slow: its fastest pair has {part:.0%} of that of the median node")
        console.log(Command("resume", "--replace", str(node)), " replaces its machine")
    return 1 if slow else 0


def _network(session: Session, cluster: Cluster) -> float:
    """Return what EC2 says of the type's network in Gbit/s, 0 where it does not."""
    spec = msgspec.structs.replace(session.settings.cluster, instance_type=cluster.type, allow_cpu=True)
    with contextlib.suppress(CloudDDPError):
        return instance_types.describe(session.aws(), spec).gbits
    return 0.0


def measured_table(found: Sequence[Measured]) -> str:
    """Return all pairs as a table, of many the slowest, and all nodes."""
    pairs = [one for one in found if not one.whole]
    best = max((one.bus for one in pairs), default=0.0)
    listed = pairs if len(pairs) <= SHOWN else sorted(pairs, key=lambda one: one.bus)[:SHOWN]
    rows = [
        (
            "all" if one.whole else "-".join(map(str, one.nodes)),
            str(one.ranks),
            size_of(one.size),
            f"{one.seconds * 1000:.1f} ms",
            f"{one.bus / 1e9:.2f}",
            "" if one.whole else f"{one.bus / best:.0%}",
        )
        for one in (*listed, *(one for one in found if one.whole))
    ]
    return table(("NODES", "RANKS", "SIZE", "TIME", "GB/S", "OF BEST"), rows)
