"""The placement group of a cluster: whether it has one, its name, and the request that creates it. Pure.

A group of strategy `cluster` places nodes close together in one zone: lower latency, and a single TCP flow
gets 10 Gbps instead of 5 (EC2 User Guide, "Placement groups"). Its name contains the cluster's id: names are
unique in an account and region, and CreatePlacementGroup has no idempotency token.
"""

from __future__ import annotations

from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster.plan_types import LaunchContext, Request, tagged
from cloudddp.config.spec import ClusterSpec

STEP = "placement-group"


def wanted(spec: ClusterSpec, info: TypeInfo, reservation: Reservation | None) -> bool:
    """Return whether the cluster gets a placement group of its own.

    Not for a capacity block, whose instances are placed together and which supports no group, nor for a
    reservation that was created in a group: its instances have to be launched into that one.
    """
    if reservation is not None and (reservation.block or reservation.placement_group):
        return False
    return spec.placement_group and spec.nodes > 1 and info.cluster_placement


def group_name(cluster: str, cluster_id: str) -> str:
    """Return the name of a cluster's own placement group."""
    return f"cloudddp-{cluster}-{cluster_id}"


def name_for(context: LaunchContext, cluster: str, cluster_id: str) -> str:
    """Return the name of the group that the nodes are launched into, or ''."""
    if context.own_placement_group:
        return group_name(cluster, cluster_id)
    return context.reservation.placement_group if context.reservation is not None else ""


def request(name: str, tags: list[dict[str, str]]) -> Request:
    """Return the request that creates the group."""
    params = {
        "GroupName": name,
        "Strategy": "cluster",
        "TagSpecifications": tagged(tags, "placement-group"),
    }
    return Request(STEP, "create_placement_group", params)
