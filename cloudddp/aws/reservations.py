"""Capacity reservations: on-demand ones and capacity blocks, by id. Read-only: cloudddp never creates or buys
one."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta, field

from cloudddp.aws import inventory
from cloudddp.aws.answers import Answer, Id
from cloudddp.aws.client import AWS
from cloudddp.errors import UsageError, q

EXCEEDED = "ReservationCapacityExceeded"
_Instances = Annotated[int, Meta(ge=0, le=100_000)]  # above it, the number is not EC2's
_Text = Annotated[str, Meta(pattern=r"^[ -~]{0,256}\Z")]


class Reservation(Answer, frozen=True):
    """A capacity reservation as EC2 describes it. Every text is safe to print."""

    id: Id = field(name="CapacityReservationId")
    state: Id
    instance_type: Id
    zone: Id = field(name="AvailabilityZone")
    total: _Instances = field(name="TotalInstanceCount")
    available: _Instances = field(name="AvailableInstanceCount")
    reservation_type: str = ""
    platform: _Text = field(name="InstancePlatform", default="")
    tenancy: _Text = ""
    start: datetime | None = field(name="StartDate", default=None)
    end: datetime | None = field(name="EndDate", default=None)
    interruptible: bool = False
    placement_group_arn: _Text = ""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that contradict each other."""
        if self.available > self.total:
            raise ValueError(f"{self.available} of {self.total} instances are available")

    @property
    def block(self) -> bool:
        """Whether it is a capacity block, which is prepaid; else it is an on-demand reservation."""
        return self.reservation_type == "capacity-block"

    @property
    def placement_group(self) -> str:
        """The name of the group that it was created in, or ''."""
        return self.placement_group_arn.rpartition("/")[2]

    @property
    def ends_before(self) -> timedelta:
        """How long before the end of a block EC2 begins to terminate its instances (EC2 User Guide, "Capacity
        Blocks for ML": those of UltraServers, P6e, earlier)."""
        return timedelta(minutes=60 if self.instance_type.startswith("p6e-") else 30)


def find(aws: AWS, name: str) -> Reservation:
    """Return a reservation by its id. Raises UsageError if there is none. One AWS call."""
    call = ("describe_capacity_reservations", Reservation)
    found = aws.listed(*call, absent="InvalidCapacityReservationId", CapacityReservationIds=[name])
    if not found:
        raise UsageError(
            f"there is no capacity reservation {name} in {aws.region}",
            hint=f"`aws ec2 describe-capacity-reservations --region {q(aws.region)}` lists those of the "
            "account and region",
        )
    return found[0]


def used(aws: AWS, name: str) -> int:
    """Return how many live instances of this account use a reservation. One AWS call."""
    filters = [{"Name": "capacity-reservation-id", "Values": [name]}]
    return sum(instance.live for instance in inventory.instances(aws, filters))
