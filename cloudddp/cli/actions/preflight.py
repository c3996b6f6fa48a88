"""`preflight`: the checks of a launch without a job, and the bandwidth between the nodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.errors import q
from cloudddp.formats import plural, table
from cloudddp.job import preflight as checks
from cloudddp.job.preflight import Measured
from cloudddp.operations.node_connections import connected

SHOWN = 28  # pairs: those of eight nodes


def preflight(console: Console, *, bandwidth: bool, as_json: bool) -> int:
    session = start_session(console)
    with connected(session, whole=True) as (cluster, runner), console.progress() as progress:
        found = checks.run(runner, cluster, session.settings, bandwidth=bandwidth, progress=progress)
    slow = checks.slow_nodes(found)
    if as_json:
        shown = {"nodes": len(cluster.nodes), "instance_type": cluster.type}
        console.print_json({**shown, "measured": msgspec.to_builtins(found), "slow_nodes": sorted(slow)})
    else:
        alike = f"{plural(len(cluster.nodes), 'node')}: connected to each other, alike, without defects"
        console.print(f"{alike}\n\n{measured_table(found)}" if found else alike)
    for node, part in slow.items():
        console.fail(f"node {node} is slow: its fastest pair has {part:.0%} of that of the median node")
        console.suggest(f"`cloudddp resume --replace {q(node)}` replaces its machine")
    return 1 if slow else 0


def measured_table(found: Sequence[Measured]) -> str:
    """Return the slowest pairs as a table, the slowest first, and all nodes."""
    pairs = sorted((one for one in found if len(one.nodes) == 2), key=lambda one: one.bus)[:SHOWN]
    named = [("-".join(map(str, one.nodes)), one) for one in pairs]
    named += [("all", one) for one in found if len(one.nodes) != 2]
    return table(("NODES", "GB/S"), [(name, f"{one.bus / 1e9:.2f}") for name, one in named])
