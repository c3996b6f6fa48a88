"""What clusters have cost, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cloudddp.cluster.costs import ClusterCost
from cloudddp.formats import table


def costs_text(found: Sequence[ClusterCost]) -> str:
    """Return a table of clusters, and one of the sums by month and project."""
    rows = []
    groups: dict[tuple[str, str], list[ClusterCost]] = {}
    for one in found:
        started = f"{one.created:%Y-%m-%d %H:%M}" if one.created else "unknown"
        so_far = " so far" if one.running else ""
        rows.append((started, one.project, one.name, one.id, one.region, _sum([one]) + so_far))
        groups.setdefault((one.month or "unknown", one.project), []).append(one)
    header = ("STARTED (UTC)", "PROJECT", "CLUSTER", "ID", "REGION", "COST")
    clusters = table(
        header, rows, redundant=("REGION",), elastic=("PROJECT", "CLUSTER"), spare=("ID", "CLUSTER")
    )
    sums = [(*name, str(len(members)), _sum(members)) for name, members in sorted(groups.items())]
    sums.append(("total", "", str(len(found)), _sum(found)))
    return f"{clusters}\n\n" + table(("MONTH", "PROJECT", "CLUSTERS", "COST"), sums, elastic=("PROJECT",))


def _sum(members: Sequence[ClusterCost]) -> str:
    known = [one.cost for one in members if one.cost.usd is not None]
    if not known:
        return "unknown"
    most = "at most " if any(cost.at_most for cost in known) else ""
    unknown = len(members) - len(known)
    more = f" and {unknown} unknown" if unknown else ""
    return f"{most}${sum(cost.usd or 0.0 for cost in known):.2f}{more}"


def cost_json(one: ClusterCost) -> dict[str, Any]:
    return {
        "cluster": one.name,
        "cluster_id": one.id,
        "region": one.region,
        "project": one.project,
        "month": one.month or None,
        "created": one.created.isoformat() if one.created else None,
        "running": one.running,
        "usd": None if one.cost.usd is None else round(one.cost.usd, 4),
        "usd_is_at_most": one.cost.at_most,
    }
