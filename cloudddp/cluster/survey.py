"""`capacity`: what AWS says of the capacity for nodes of a type, in each region. Read-only, and nothing is
bought.

An answer that is missing, because a policy denies the call or the region has no such service, is no error: it
is reported beside the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cloudddp.aws import instance_types, networks, offerings, quotas
from cloudddp.aws.client import AWS
from cloudddp.aws.offerings import Block
from cloudddp.cluster import offers
from cloudddp.cluster.node_addresses import in_parallel
from cloudddp.config.cluster_spec import ClusterSpec, Placement
from cloudddp.errors import CloudDDPError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Zone:
    """A zone that offers the type: its spot price now, and AWS's score of getting it, 1 to 10."""

    zone: str
    spot_usd_per_hour: float | None
    spot_score: int | None


@dataclass(frozen=True, slots=True)
class VCpus:
    """A quota, in vCPUs."""

    market: str
    code: str
    vcpus: int
    in_use: int


@dataclass(slots=True)
class Place:
    """What a region has of a type; `--json` prints the fields. `problems`: what it does not answer, and why,
    by kind, such as price."""

    region: str
    type: str
    nodes: int
    usd_per_hour: float | None = None  # of a node on demand
    vcpus_needed: int | None = None  # None: the region lacks the type, or does not answer
    zones: list[Zone] = field(default_factory=list)
    quotas: list[VCpus] = field(default_factory=list)
    blocks: list[Block] | None = None  # None: AWS sells none of this type
    problems: dict[str, str] = field(default_factory=dict)

    def ask(self, kind: str, call: Callable[[], T]) -> T | None:
        """Return what a call returns; None if it fails, and keep its error."""
        try:
            return call()
        except CloudDDPError as error:
            self.problems[kind] = error.message
            return None


def survey(clouds: Sequence[AWS], spec: ClusterSpec, days: int) -> list[Place]:
    """Return what each region has of each type of the settings, for their number of nodes; capacity blocks of
    so many days. At most 14 AWS calls for each, several places at a time."""
    for aws in clouds:  # botocore creates clients in one thread only
        for service in ("ec2", "pricing", "service-quotas"):
            aws.client(service)
    wanted = replace(spec, spot=False, allow_cpu=True).candidates
    return in_parallel([functools.partial(_place, aws, one, days) for one in wanted for aws in clouds])


def _place(aws: AWS, spec: Placement, days: int) -> Place:
    name, nodes = spec.instance_type, spec.nodes
    place = Place(aws.region, name, nodes)
    info = place.ask("type", lambda: instance_types.describe(aws, spec))
    if info is None:
        return place
    place.vcpus_needed = nodes * info.vcpus
    zones = place.ask("zones", lambda: sorted(networks.zones_offering(aws, name))) or []
    price = offers.listed(aws, name)
    place.usd_per_hour = price.usd if price else None
    spot = place.ask("spot price", lambda: instance_types.spot_prices(aws, name)) or {}
    scores = place.ask("spot score", lambda: offerings.spot_scores(aws, name, nodes)) or {}
    place.zones = [Zone(zone, spot.get(zone), scores.get(zone)) for zone in zones]
    for market in ("on demand", "spot"):
        if (quota := quotas.quota_of(name, spot=market == "spot")) is not None:
            read = functools.partial(quotas.usage, aws, quota, place.vcpus_needed)
            if (found := place.ask(f"quota {market}", read)) is not None:
                place.quotas.append(VCpus(market, quota.code, found.limit, found.used))
    if info.blocks:
        place.blocks = place.ask("blocks", lambda: offerings.blocks(aws, name, nodes, days)) or []
    return place
