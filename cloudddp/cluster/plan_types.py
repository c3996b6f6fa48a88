"""The parts of a plan: what is known before planning, one AWS call, and a value that an earlier call returns.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster.interfaces import ORDINARY, Interface


@dataclass(frozen=True, slots=True)
class Ref:
    """The answer of an earlier step, by its key: `Ref("security-group", "GroupId")`."""

    step: str
    key: str


@dataclass(frozen=True, slots=True)
class Request:
    """One AWS call: the name of the step, the botocore method, its parameters (which may contain Refs)."""

    step: str
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What AWS answered before planning, and the time. `subnets` are one per zone, in the order in which to
    try them."""

    region: str
    info: TypeInfo
    image: Image
    subnets: tuple[Subnet, ...]
    ssh_from: tuple[str, ...]
    owner: str
    now: datetime
    interfaces: tuple[Interface, ...] = ORDINARY  # of each node
    own_placement_group: bool = False  # whether the cluster gets a placement group
    reservation: Reservation | None = None

    @property
    def vpc_id(self) -> str:
        return self.subnets[0].vpc_id


def tagged(tags: list[dict[str, str]], *kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]
