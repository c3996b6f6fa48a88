"""Clusters as they are, as text and as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cloudddp.aws.inventory import Instance
from cloudddp.cluster import nodes_end
from cloudddp.cluster.lookup import OrphanedResources, Ownership
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.prices import Cost
from cloudddp.errors import Message, inert, q
from cloudddp.formats import dollars, plural, table

UNKNOWN_OWNER = "an unknown owner"


def cluster(found: Cluster, ownership: Ownership) -> str:
    head = f"cluster {found.name} ({found.id or 'no id'}) in {found.region}, created by {found.owner or '-'}"
    if not ownership.owns(found):
        head += f" (not yours; {ownership.caller})"
    if found.missing:
        has = "has" if found.missing == 1 else "have"
        head += f"\n  warning: {plural(found.missing, 'node')} of it {has} ended"
    if found.live:
        head += f"\n  {spending(found)}"
        if unused := nodes_end.of(found).unused:
            head += f"\n  or {unused}"
    return head + "\n" + nodes_table(found)


def spending(found: Cluster) -> str:
    """Return the price, the cost so far and the time left, as a sentence."""
    price = "price unknown" if found.hour is None else f"{dollars(found.hour)} an hour"
    if found.spot:
        price = "spot, " + (price if found.hour is None else f"at most {price}")
    return f"{price}, {amount(found.cost())} so far; {end_of(found)}"


def end_of(found: Cluster) -> str:
    return f"{found.time_left}; `down` terminates it" if found.overdue else f"terminates in {found.time_left}"


def nodes_table(found: Cluster) -> str:
    rows = [
        (rank, node.id, node.state, node.type, node.zone, node.private_ip, node.public_ip or "-")
        for rank, node in (
            *((str(rank), node) for rank, node in found.nodes.items()),
            *(("-", one.instance) for one in found.foreign),
        )
    ]
    rows += [("-", node.id, node.state, node.type, node.zone, "-", "-") for node in found.gone]
    header = ("NODE", "INSTANCE", "STATE", "TYPE", "ZONE", "PRIVATE", "PUBLIC")
    # The addresses that nobody connects to first.
    unused = "PRIVATE" if any(node.public_ip for node in found.live) else "PUBLIC"
    return table(header, rows, spare=(unused, "TYPE", "ZONE"))


def clusters_table(found: list[Cluster]) -> str:
    rows = [
        (
            c.name,
            c.id or "-",
            c.region,
            str(len(c.live)),
            c.type,
            c.time_left,
            dollars(c.hour),
            amount(c.cost()),
            c.owner or "-",
        )
        for c in found
    ]
    header = ("CLUSTER", "ID", "REGION", "NODES", "TYPE", "TIME LEFT", "PER HOUR", "SO FAR", "OWNER")
    redundant = () if len({c.region for c in found}) > 1 else ("REGION",)
    return table(header, rows, redundant=redundant, elastic=("OWNER",), spare=("ID",))


def remains_text(found: OrphanedResources) -> str:
    """Return one line for what is left of a cluster without nodes, and what removes it."""
    kinds = [resource.kind for resource in found.resources]
    listed = ", ".join(plural(kinds.count(kind), kind) for kind in dict.fromkeys(kinds))
    of = found.tags.owner or UNKNOWN_OWNER
    who = inert(f"cluster {found.name} ({found.id or 'no id'}) in {found.region} of {of}")
    if found.being_created:
        return f"{who} is being created on this computer; it has no nodes yet"
    price = f", costing ${found.hour:.3f} an hour" if found.hour else ""
    return Message(
        f"{who} has no nodes; left: {listed}{price}: `cloudddp down -c {q(found.name)} --region "
        f"{q(found.region)}` removes it"
    )


def remains_json(found: OrphanedResources, ownership: Ownership) -> dict[str, Any]:
    """Return the same keys as `cluster_json`, and `left`."""
    tags = found.tags
    return {
        "cluster": found.name,
        "cluster_id": found.id or None,
        "region": found.region,
        "owner": tags.owner,
        "yours": all(map(ownership.mine, found.resources)),
        "created": tags.created.isoformat() if tags.created else None,
        "expires": tags.expires.isoformat() if tags.expires else None,
        "ends_after_job": None,
        "ends_after_job_minutes": None,
        "idle_minutes": None,
        "usd_per_hour": round(found.hour, 4),
        "usd_per_hour_is_at_most": False,
        "usd_so_far": None,
        "usd_so_far_is_at_most": False,
        "credentials_end": None,
        "nodes": [],
        "ended": [],
        "left": [{"kind": resource.kind, "id": resource.id} for resource in found.resources],
    }


def cluster_json(
    found: Cluster, ownership: Ownership, credentials_end: datetime | None = None
) -> dict[str, Any]:
    hour, bill, plan = found.hour, found.cost(), nodes_end.planned(found.id)
    return {
        "cluster": found.name,
        "cluster_id": found.id or None,
        "region": found.region,
        "owner": found.owner,
        "yours": ownership.owns(found),
        "created": found.created.isoformat() if found.created else None,
        "expires": found.expires.isoformat() if found.expires else None,
        "ends_after_job": plan.job if plan is not None else None,
        "ends_after_job_minutes": plan.minutes if plan is not None else None,
        "idle_minutes": found.idle_minutes or None,
        "usd_per_hour": None if hour is None else round(hour, 4),
        "usd_per_hour_is_at_most": found.spot,
        "usd_so_far": None if bill.usd is None else round(bill.usd, 4),
        "usd_so_far_is_at_most": bill.at_most,
        "credentials_end": credentials_end.isoformat() if credentials_end else None,
        "nodes": [
            _node_json(rank, node)
            for rank, node in (*found.nodes.items(), *((None, one.instance) for one in found.foreign))
        ],
        "ended": [_node_json(None, node) for node in found.gone],
    }


def _node_json(rank: int | None, node: Instance) -> dict[str, Any]:
    return {
        "node": rank,
        "instance_id": node.id,
        "state": node.state,
        "type": node.type,
        "zone": node.zone,
        "spot": node.spot,
        "private_ip": node.private_ip,
        "public_ip": node.public_ip,
    }


def at(time: datetime | None) -> str:
    return f"on {time:%Y-%m-%d at %H:%M} UTC" if time else "at an unknown time"


def amount(bill: Cost) -> str:
    """Return a sum, marked if it is an upper bound: AWS does not always report when a node ended."""
    return f"{'at most ' if bill.at_most and bill.usd is not None else ''}{dollars(bill.usd)}"
