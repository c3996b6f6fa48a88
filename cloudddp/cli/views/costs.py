"""What clusters have cost, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from cloudddp.cluster.costs import ClusterCost
from cloudddp.formats import table


def costs_text(found: Sequence[ClusterCost]) -> str:
    """Return a table of clusters, and one of the sums by month and project."""
    rows = []
    groups: dict[tuple[str, str], list[ClusterCost]] = {}
    for one in found:
        started = one.created[:16].replace("T", " ") if one.created else "unknown"
        so_far = " so far" if one.running else ""
        rows.append((started, one.project, one.cluster, one.cluster_id, one.region, _sum([one]) + so_far))
        groups.setdefault((one.month or "unknown", one.project), []).append(one)
    header = ("STARTED (UTC)", "PROJECT", "CLUSTER", "ID", "REGION", "COST")
    clusters = table(
        header, rows, redundant=("REGION",), elastic=("PROJECT", "CLUSTER"), spare=("ID", "CLUSTER")
    )
    sums = [(*name, str(len(members)), _sum(members)) for name, members in sorted(groups.items())]
    sums.append(("total", "", str(len(found)), _sum(found)))
    return f"{clusters}\n\n" + table(("MONTH", "PROJECT", "CLUSTERS", "COST"), sums, elastic=("PROJECT",))


def _sum(members: Sequence[ClusterCost]) -> str:
    if not (known := [member.usd for member in members if member.usd is not None]):
        return "unknown"
    most = "at most " if any(member.usd_is_at_most for member in members) else ""
    unknown = len(members) - len(known)
    more = f" and {unknown} unknown" if unknown else ""
    return f"{most}${sum(known):.2f}{more}"
