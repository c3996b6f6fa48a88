"""What clusters have cost, also those that are gone: from AWS while it lists their instances, else from the
records of this computer. A cluster that has ended without a `down` counts until its deadline, as an upper
bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from cloudddp.cluster.model import Cluster
from cloudddp.cluster.prices import POWER_OFF, Cost, billed_hours
from cloudddp.local_state import ClusterRecord
from cloudddp.tags import parse_time


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """A cluster as `cost --json` shows it. `project`: the name of the project's folder, or that of the
    cluster. `created` and `month`, in UTC, are of its start. `running`: the cost is that so far."""

    cluster: str
    cluster_id: str
    region: str
    project: str
    month: str | None
    created: str | None
    running: bool
    usd: float | None
    usd_is_at_most: bool


def collect(recorded: Iterable[ClusterRecord], listed: Iterable[Cluster], now: datetime) -> list[ClusterCost]:
    """Return the cost of each cluster, the oldest first. `listed`: those of the caller that AWS lists."""
    by_id, found = {cluster.id: cluster for cluster in listed if cluster.id}, []
    for record in recorded:
        cluster = by_id.pop(record.id, None)
        if cluster is not None and (cluster.live or record.usd is None):
            found.append(_from_aws(cluster, record.project or cluster.name, now))
        else:
            found.append(_from_record(record, now))
    found += [_from_aws(cluster, cluster.name, now) for cluster in by_id.values()]
    return sorted(found, key=lambda one: (one.created or "", one.cluster_id))


def _from_aws(one: Cluster, project: str, now: datetime) -> ClusterCost:
    return _row(one, project, one.created, one.cost(now), running=bool(one.live))


def _from_record(record: ClusterRecord, now: datetime) -> ClusterCost:
    """Return the cost that `down` has recorded, else what all nodes cost until the deadline."""
    created, end = parse_time(record.created), parse_time(record.expires)
    cost, running = Cost(record.usd, record.usd_is_at_most), False
    if record.usd is None and record.node_hour is not None and created and end:
        hours = billed_hours((min(now, end + POWER_OFF) - created).total_seconds())
        cost, running = Cost(record.node_hour * record.nodes * hours, at_most=True), now < end
    return _row(record, record.project or record.name, created, cost, running=running)


def _row(
    one: Cluster | ClusterRecord, project: str, created: datetime | None, cost: Cost, *, running: bool
) -> ClusterCost:
    month, start = (f"{created:%Y-%m}", created.isoformat()) if created else (None, None)
    usd = None if cost.usd is None else round(cost.usd, 4)
    return ClusterCost(one.name, one.id, one.region, project, month, start, running, usd, cost.at_most)
