"""What clusters have cost, also those that are gone: from AWS while it lists their instances, else from the
journal of this computer. A cluster that has ended without a `down` counts until its deadline, as an upper
bound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.cluster.model import Cluster
from cloudddp.cluster.prices import POWER_OFF, Cost, billed_hours
from cloudddp.errors import CloudDDPError
from cloudddp.local_state import COST, GONE, ClusterFolder, ClusterRecord
from cloudddp.tags import parse_time

_MOST = 1e6  # USD, and nodes: more is not cloudddp's


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """`project`: the name of the project's folder, or that of the cluster. `running`: the cost is that so
    far."""

    name: str
    id: str
    region: str
    project: str
    created: datetime | None
    running: bool
    cost: Cost

    @property
    def month(self) -> str:
        """The month in which it was created, in UTC, as 2026-11; '' if that is unknown."""
        return f"{self.created:%Y-%m}" if self.created else ""


def collect(
    recorded: Iterable[tuple[ClusterFolder, ClusterRecord]], listed: Iterable[Cluster], now: datetime
) -> list[ClusterCost]:
    """Return the cost of each cluster, the oldest first. `listed`: those of the caller that AWS lists."""
    by_id, found = {cluster.id: cluster for cluster in listed if cluster.id}, []
    for folder, record in recorded:
        cluster, events = by_id.pop(folder.id, None), list[dict[str, Any]]()
        with contextlib.suppress(OSError, CloudDDPError, ValueError):  # an unreadable journal counts as empty
            events = folder.events()
        ended = any(event.get("event") == COST for event in events)
        if cluster is not None and (cluster.live or not ended):
            found.append(_from_aws(cluster, str(record.project or record.name), now))
        elif ended or folder.created_instances() or all(event.get("event") != GONE for event in events):
            found.append(_from_journal(record, events, now))
    found += [_from_aws(cluster, cluster.name, now) for cluster in by_id.values()]
    earliest = datetime.min.replace(tzinfo=UTC)
    return sorted(found, key=lambda one: (one.created or earliest, one.id))


def _from_aws(one: Cluster, project: str, now: datetime) -> ClusterCost:
    return ClusterCost(one.name, one.id, one.region, project, one.created, bool(one.live), one.cost(now))


def _from_journal(record: ClusterRecord, events: list[dict[str, Any]], now: datetime) -> ClusterCost:
    """Return the cost that `down` has recorded, else what all nodes cost until the deadline."""
    costs = [
        Cost(float(event["usd"]), event.get("at_most") is not False)
        for event in events
        if event.get("event") == COST and _is_number(event.get("usd"))
    ]
    created = parse_time(str(record.created)) or next((_time(event) for event in events), None)
    ends = [
        parse_time(str(record.expires)),
        *(_time(event) for event in events if event.get("event") == GONE),
    ]
    end = min((one for one in ends if one is not None), default=None)
    cost = min(costs, key=lambda one: one.usd or 0.0, default=Cost(None))
    hour = record.node_hour
    known = _is_number(hour) and _is_number(record.nodes) and record.nodes > 0
    if not costs and created and end and known and hour:
        seconds = (min(now, end + POWER_OFF) - created).total_seconds()
        cost = Cost(hour * record.nodes * billed_hours(seconds), at_most=True)
    running = not costs and end is not None and now < end
    name, project = str(record.name), str(record.project or record.name)
    return ClusterCost(name, str(record.id), str(record.region), project, created, running, cost)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < _MOST


def _time(event: dict[str, Any]) -> datetime | None:
    return parse_time(f"{str(event.get('time'))[:19]}Z")
