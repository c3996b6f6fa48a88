"""`capacity`: what AWS says of the capacity for nodes of a type, in each region. Read-only, and nothing is
bought.

An answer that is missing, because a policy denies the call or the region has no such service, is no error: it
is reported beside the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from cloudddp.aws import instance_types, networks, offerings, quotas
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.offerings import Block
from cloudddp.aws.quotas import Usage
from cloudddp.cluster import offers
from cloudddp.cluster.node_addresses import in_parallel
from cloudddp.cluster.prices import Listed
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError

T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """What a region has of a type. `problems`: what it does not answer, and why; by kind, such as price."""

    region: str
    type: str
    info: TypeInfo | None = None  # None: the region lacks the type, or does not answer
    zones: tuple[str, ...] = ()  # that offer the type
    price: Listed | None = None  # of a node on demand
    spot: Mapping[str, float] = field(default_factory=dict)  # zone -> USD per hour of a node now
    scores: Mapping[str, int] = field(default_factory=dict)  # zone -> 1 to 10
    quotas: dict[str, Usage] = field(default_factory=dict)  # market -> quota
    blocks: tuple[Block, ...] = ()
    problems: dict[str, CloudDDPError] = field(default_factory=dict)

    def ask(self, kind: str, call: Callable[[], T], instead: T) -> T:
        """Return what a call returns; if it fails, `instead`, and keep its error."""
        try:
            return call()
        except CloudDDPError as error:
            self.problems[kind] = error
            return instead


def survey(clouds: Sequence[AWS], spec: ClusterSpec, days: int) -> list[Place]:
    """Return what each region has of each type of the settings, for their number of nodes; capacity blocks of
    so many days. At most 14 AWS calls for each, several places at a time."""
    for aws in clouds:  # botocore creates clients in one thread only
        for service in ("ec2", "pricing", "service-quotas"):
            aws.client(service)
    wanted = msgspec.structs.replace(spec, spot=False, allow_cpu=True).candidates
    return in_parallel([functools.partial(_place, aws, one, days) for one in wanted for aws in clouds])


def _place(aws: AWS, spec: ClusterSpec, days: int) -> Place:
    name, nodes = spec.instance_type, spec.nodes
    place = Place(aws.region, name)
    place.info = info = place.ask("type", lambda: instance_types.describe(aws, spec), None)
    if info is None:
        return place
    place.zones = place.ask("zones", lambda: tuple(sorted(networks.zones_offering(aws, name))), ())
    place.price = offers.listed(aws, name)
    place.spot = place.ask("spot price", lambda: instance_types.spot_prices(aws, name), {})
    place.scores = place.ask("spot score", lambda: offerings.spot_scores(aws, name, nodes), {})
    for market in ("on demand", "spot"):
        if (quota := quotas.quota_of(name, spot=market == "spot")) is not None:
            read = functools.partial(quotas.usage, aws, quota, nodes * info.vcpus)
            if (usage := place.ask(f"quota {market}", read, None)) is not None:
                place.quotas[market] = usage
    if info.blocks:
        place.blocks = place.ask("blocks", lambda: offerings.blocks(aws, name, nodes, days), ())
    return place
