"""Capacity reservations: on-demand ones and capacity blocks, by id. Read-only: cloudddp never creates or buys one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError, CloudDDPError, UsageError
from cloudddp.text import one_line

EXCEEDED = "ReservationCapacityExceeded"
_NOT_FOUND = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
_MOST = 100_000  # instances; above it, the number is not EC2's


@dataclass(frozen=True, slots=True)
class Reservation:
    """A capacity reservation as EC2 describes it. Every text is safe to print."""

    id: str
    block: bool  # a capacity block, which is prepaid; else an on-demand reservation
    state: str
    instance_type: str
    platform: str
    tenancy: str
    zone: str
    total: int  # instances
    available: int
    start: datetime | None
    end: datetime | None
    placement_group: str  # the name of the group that it was created in, or ''


def find(aws: AWS, name: str) -> Reservation:
    """Return a reservation by its id. Raises UsageError if there is none. One AWS call."""
    try:
        answer = aws.call("ec2", "describe_capacity_reservations", CapacityReservationIds=[name])
    except AWSError as error:
        if error.code not in _NOT_FOUND:
            raise
        answer = {}
    found = answer.get("CapacityReservations", [])
    if not found:
        raise UsageError(
            f"there is no capacity reservation {name} in {aws.region}",
            hint="`aws ec2 describe-capacity-reservations` lists those of the account and region",
        )
    return decode(found[0])


def decode(item: dict[str, Any]) -> Reservation:
    """Return the record of one reservation, given AWS's description of it. Raises CloudDDPError for invalid numbers."""
    total, available = item.get("TotalInstanceCount"), item.get("AvailableInstanceCount")
    if not isinstance(total, int) or not isinstance(available, int) or not 0 <= available <= total <= _MOST:
        raise CloudDDPError(
            f"AWS describes a capacity reservation with {available!r} of {total!r} instances free",
            hint="look at the reservation in the AWS console",
        )
    return Reservation(
        id=_text(item.get("CapacityReservationId")),
        block=item.get("ReservationType") == "capacity-block",
        state=_text(item.get("State")),
        instance_type=_text(item.get("InstanceType")),
        platform=_text(item.get("InstancePlatform")),
        tenancy=_text(item.get("Tenancy")),
        zone=_text(item.get("AvailabilityZone")),
        total=total,
        available=available,
        start=_time(item.get("StartDate")),
        end=_time(item.get("EndDate")),
        placement_group=_text(item.get("PlacementGroupArn")).rpartition("/")[2],
    )


def used(aws: AWS, name: str) -> int:
    """Return how many live instances of this account use a reservation. One AWS call."""
    filters = [{"Name": "capacity-reservation-id", "Values": [name]}]
    return sum(instance.live for instance in inventory.instances(aws, filters))


def _text(value: object) -> str:
    return one_line(str(value or ""), 100)


def _time(value: object) -> datetime | None:
    return value if isinstance(value, datetime) else None  # parsed by botocore
