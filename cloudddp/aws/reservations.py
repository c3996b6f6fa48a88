"""Capacity reservations: on-demand ones and capacity blocks, by id. Read-only: cloudddp never creates or buys
one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec

from cloudddp.aws import inventory
from cloudddp.aws.answers import Id, Record
from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError, ToolCommand, UsageError
from cloudddp.text import one_line

EXCEEDED = "ReservationCapacityExceeded"
_NOT_FOUND = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
_Instances = Annotated[int, msgspec.Meta(ge=0, le=100_000)]  # above it, the number is not EC2's


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


class _Reservation(Record, frozen=True):
    capacity_reservation_id: Id
    state: str
    instance_type: Id
    availability_zone: Id
    total_instance_count: _Instances
    available_instance_count: _Instances
    reservation_type: str = ""
    instance_platform: str = ""
    tenancy: str = ""
    start_date: datetime | None = None
    end_date: datetime | None = None
    placement_group_arn: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that contradict each other."""
        available, total = self.available_instance_count, self.total_instance_count
        if available > total:
            raise ValueError(f"{available} of {total} instances are available")


def find(aws: AWS, name: str) -> Reservation:
    """Return a reservation by its id. Raises UsageError if there is none. One AWS call."""
    try:
        call = ("ec2", "describe_capacity_reservations", "CapacityReservations", _Reservation)
        found = aws.listed(*call, CapacityReservationIds=[name])
    except AWSError as error:
        if error.code not in _NOT_FOUND:
            raise
        found = []
    if not found:
        raise UsageError(
            f"there is no capacity reservation {name} in {aws.region}",
            hint=(
                ToolCommand("aws", "ec2", "describe-capacity-reservations", "--region", aws.region),
                " lists those of the account and region",
            ),
        )
    return _reservation(found[0])


def _reservation(item: _Reservation) -> Reservation:
    return Reservation(
        id=item.capacity_reservation_id,
        block=item.reservation_type == "capacity-block",
        state=_text(item.state),
        instance_type=item.instance_type,
        platform=_text(item.instance_platform),
        tenancy=_text(item.tenancy),
        zone=item.availability_zone,
        total=item.total_instance_count,
        available=item.available_instance_count,
        start=item.start_date,
        end=item.end_date,
        placement_group=_text(item.placement_group_arn).rpartition("/")[2],
    )


def used(aws: AWS, name: str) -> int:
    """Return how many live instances of this account use a reservation. One AWS call."""
    filters = [{"Name": "capacity-reservation-id", "Values": [name]}]
    return sum(instance.live for instance in inventory.instances(aws, filters))


def _text(value: object) -> str:
    return one_line(str(value or ""), 100)
