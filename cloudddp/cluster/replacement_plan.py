"""The launch of a node that takes the place of one that a cluster has lost: as `up` launched that, but for
what a single node needs of its own. Pure but for the record of the launch, which `up` keeps on this computer.

The record holds the parameters of RunInstances, not the user data: that contains the private key with which
nodes boot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudddp.cluster.plan import SHORTEST, Launch
from cloudddp.cluster.plan_types import Request
from cloudddp.cluster.run_instances import client_token
from cloudddp.cluster.user_data import Identity, IdleGuard, user_data
from cloudddp.errors import CloudDDPError, Command
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import TAG_NODE_RANK

_OMITTED = ("UserData", "ClientToken")
_MAX_RECORD = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Replacement:
    """The plan that launches one node: see create.LaunchPlan."""

    rank: int
    cluster_id: str
    region: str
    launches: tuple[Launch, ...]
    requests: tuple[Request, ...] = ()

    @property
    def token(self) -> str:
        return str(self.launches[0].request.params["ClientToken"])


def keep(folder: ClusterFolder, params: Mapping[str, Any]) -> None:
    """Record the parameters of a launch, without its secrets."""
    kept = {key: value for key, value in params.items() if key not in _OMITTED}
    folder.write(folder.launch, f"{json.dumps(kept, indent=1)}\n")


def recorded(folder: ClusterFolder) -> dict[str, Any]:
    """Return what `keep` recorded. Raises CloudDDPError if it was not recorded here, or is damaged."""
    try:
        text = folder.read(folder.launch)
        found = json.loads(text) if text is not None and len(text) <= _MAX_RECORD else None
    except (ValueError, RecursionError):
        found = None
    kinds = {"ImageId": str, "InstanceType": str, "TagSpecifications": list, "NetworkInterfaces": list}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), kind) for key, kind in kinds.items()
    ):
        raise CloudDDPError(
            f"this computer has no record of how the nodes of cluster {folder.id} were launched, so it "
            "cannot replace one",
            hint=(Command("pull"), " what you need, then ", Command("down"), " and ", Command("up")),
        )
    return found


def plan(
    launch: Mapping[str, Any],
    identity: Identity,
    *,
    rank: int,
    zone: str,
    region: str,
    attempt: int,
    now: datetime,
    expires: datetime,
    units: tuple[str, str],
    idle: IdleGuard | None = None,
) -> Replacement:
    """Return the launch of the node of that rank, in the subnet of the others and with their deadline.

    `launch` is that of `up`; `attempt` distinguishes the launches of one cluster. Raises CloudDDPError if the
    deadline is too near for a node to boot.
    """
    if expires - now < SHORTEST:
        raise CloudDDPError(
            f"the deadline of the cluster is at {expires:%Y-%m-%d %H:%M} UTC, too soon to replace a node",
            hint=(Command("pull"), " what you need; then ", Command("down"), " and ", Command("up")),
        )
    params = {
        **launch,
        "MinCount": 1,
        "MaxCount": 1,
        "TagSpecifications": [_with_rank(one, rank) for one in launch["TagSpecifications"]],
        "UserData": user_data(identity, now, expires, units, idle),
    }
    params["ClientToken"] = client_token(identity.cluster_id, attempt, zone, params)
    return Replacement(
        rank, identity.cluster_id, region, (Launch(zone, Request("nodes", "run_instances", params)),)
    )


def _with_rank(specification: Mapping[str, Any], rank: int) -> dict[str, Any]:
    tags = [tag for tag in specification["Tags"] if tag["Key"] != TAG_NODE_RANK]
    return {**specification, "Tags": [*tags, {"Key": TAG_NODE_RANK, "Value": str(rank)}]}
