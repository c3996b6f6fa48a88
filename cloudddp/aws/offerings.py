"""What EC2 says of the capacity of an instance type: how likely spot instances are, and which capacity blocks
are for sale. Read-only: nothing here buys one.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import msgspec

from cloudddp.aws.answers import Answer, Id
from cloudddp.aws.client import AWS


class _Offering(Answer, frozen=True):
    capacity_block_offering_id: Id
    availability_zone: Id
    instance_count: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    start_date: datetime
    end_date: datetime
    upfront_fee: Annotated[str, msgspec.Meta(pattern=r"^\d{1,12}(\.\d{1,10})?\Z")]


@dataclass(frozen=True, slots=True)
class Block:
    """A capacity block for sale: so many instances in one zone, paid in advance."""

    id: str
    zone: str
    nodes: int
    starts: datetime
    ends: datetime
    usd: float
    usd_per_hour: float  # of one instance
    purchase: str  # the command with which the user may buy it


class _Zone(Answer, frozen=True):
    zone_id: Id
    zone_name: Id


class _Score(Answer, frozen=True):
    availability_zone_id: Id
    score: Annotated[int, msgspec.Meta(ge=0, le=10)]


def spot_scores(aws: AWS, instance_type: str, count: int) -> dict[str, int]:
    """Return for each zone AWS's score of getting so many spot instances at once, up to 10; for a single type
    it is always low (API reference), so that only zones can be compared. Two calls. Raises AWSError."""
    scores = aws.listed(
        "get_spot_placement_scores",
        _Score,
        InstanceTypes=[instance_type],
        TargetCapacity=count,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=True,
        RegionNames=[aws.region],
    )
    zones = aws.listed("describe_availability_zones", _Zone)
    names = {zone.zone_id: zone.zone_name for zone in zones}
    return {
        names.get(score.availability_zone_id, score.availability_zone_id): score.score for score in scores
    }


def blocks(aws: AWS, instance_type: str, count: int, days: int) -> list[Block]:
    """Return the capacity blocks for sale that are so long and have so many instances, the earliest first. A
    call a page. Raises AWSError."""
    wanted: dict[str, Any] = {
        "InstanceType": instance_type,
        "InstanceCount": count,
        "CapacityDurationHours": 24 * days,
    }
    found = aws.listed("describe_capacity_block_offerings", _Offering, **wanted)
    return sorted((_block(one, aws.region) for one in found), key=lambda block: (block.starts, block.usd))


def _block(one: _Offering, region: str) -> Block:
    usd, hours = float(one.upfront_fee), (one.end_date - one.start_date).total_seconds() / 3600
    words = ("aws", "ec2", "purchase-capacity-block", "--capacity-block-offering-id")
    more = ("--instance-platform", "Linux/UNIX", "--region", region)
    return Block(
        one.capacity_block_offering_id,
        one.availability_zone,
        one.instance_count,
        one.start_date,
        one.end_date,
        usd,
        round(usd / (one.instance_count * max(hours, 1.0)), 4),
        shlex.join((*words, one.capacity_block_offering_id, *more)),
    )
