"""Capacity reservations: on-demand ones, created by the API, and capacity blocks, which are a condition.

A reservation holds places for instances of one type, platform and tenancy in one zone. An instance uses a
place until it has ended and EC2 has cleaned up (condition `cleanup`). Without a target, an instance uses an
open on-demand reservation that matches it (EC2 User Guide, "Launch instances into an existing Capacity
Reservation").
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from cloudddp.simulator.conditions.model import Block
from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import (
    add,
    backend_data,
    client_error,
    invalid_combination,
    invalid_value,
    parameters,
    result,
    server_error,
)

BLOCK_END = timedelta(minutes=30)
"""Before the end of a block, EC2 begins to terminate its instances (EC2 User Guide, "Capacity Blocks for
ML")."""
EXPIRED = "Server.CapacityBlockExpired: Instance terminated because its Capacity Block ends"

_MOST = 1000  # instances of one reservation
_PLATFORM = "Linux/UNIX"  # of every image of the simulator


@dataclass(frozen=True, slots=True)
class Request:
    """What a launch needs of a reservation. `market`: '' for on-demand."""

    instance_type: str
    zone: str
    count: int
    market: str
    tenancy: str
    placement_group: str  # name, or ''


def install() -> None:
    """Add the actions to moto's EC2."""
    from moto.ec2.responses import EC2Response

    add(
        EC2Response,
        create_capacity_reservation=_create,
        describe_capacity_reservations=_describe,
        cancel_capacity_reservation=_cancel,
    )


def check(backend: Any, request: Request) -> Any:
    """Return the reservation that a launch targets, or None. Fails the request if the launch does not fit it.

    For a reservation that does not match or has not enough places, EC2 has one code and one message (in
    hashicorp/terraform-provider-aws, pull request 35745).
    """
    block = request.market == "capacity-block"
    target = (parameters().get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget")
    name = (target or {}).get("CapacityReservationId")
    if not name:
        if block:
            invalid_combination("A Capacity Reservation ID is required for the market type capacity-block.")
        return None
    found = _find(backend, name)
    if request.market == "spot":
        invalid_combination("A Spot Instance cannot be launched into a Capacity Reservation.")
    if block != (found.reservation_type == "capacity-block"):
        invalid_combination(
            f"The market type does not match the type of the Capacity Reservation '{name}', which is "
            f"{found.reservation_type}."
        )
    if block and request.placement_group:
        invalid_combination("Capacity Blocks do not support instances in a placement group.")
    if not found.matches(request) or found.available_instance_count < request.count:
        _exceeded()
    if request.placement_group and not found.placement_group_arn and request.count > 1:
        # Its instances may be anywhere in the zone; so a user got 11 of 16 into a group (eksctl, issue 7949).
        server_error(
            "InsufficientInstanceCapacity",
            "The requested reservation does not have sufficient capacity in the placement group "
            f"{request.placement_group}.",
        )
    return found


def _exceeded() -> NoReturn:
    client_error(
        "ReservationCapacityExceeded",
        "The requested reservation does not have sufficient compatible and available capacity for this "
        "request.",
    )


def open_for(backend: Any, request: Request) -> Any:
    """Return an open on-demand reservation with places for a launch that targets none, or None."""
    preference = (parameters().get("CapacityReservationSpecification") or {}).get(
        "CapacityReservationPreference"
    )
    if request.market or preference == "none":
        return None
    return next(
        (
            one
            for one in _created(backend).values()
            if one.instance_match_criteria == "open"
            and one.matches(request)
            and one.available_instance_count >= request.count
        ),
        None,
    )


def join(instance: Any, reservation: Any) -> None:
    """Let an instance use a place of the reservation."""
    instance.capacity_reservation_id = reservation.id
    instance.capacity_reservation_specification = {
        "CapacityReservationTarget": {"CapacityReservationId": reservation.id}
    }


def leave(instance: Any) -> None:
    """Note the time at which an instance ended, from which its place is cleaned up."""
    instance._left_reservation = time.monotonic()


def ends(instance: Any) -> datetime | None:
    """Return when EC2 terminates an instance because its capacity block ends; None for any other instance."""
    block = CONDITIONS.read().blocks.get(getattr(instance, "capacity_reservation_id", None) or "")
    return block.end - BLOCK_END if block else None


def _created(backend: Any) -> dict[str, Any]:
    reservations: dict[str, Any] = backend_data(backend, "capacity_reservations", dict)
    return reservations


def _blocks(backend: Any) -> dict[str, Any]:
    return {
        name: _block(backend, name, block)
        for name, block in CONDITIONS.read().blocks.items()
        if block.zone.startswith(backend.region_name)
    }


def _find(backend: Any, name: str) -> Any:
    found = _created(backend).get(name) or _blocks(backend).get(name)
    if found is None:
        client_error(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{name}' does not exist"
        )
    return found


def _reservation_class() -> type[Any]:
    from moto.ec2.models.core import TaggedEC2Resource

    class CapacityReservation(TaggedEC2Resource):
        """As DescribeCapacityReservations shows it; filters refer to the attributes."""

        def __init__(self, backend: Any, name: str, *, start: datetime, end: datetime | None) -> None:
            self.ec2_backend = backend
            self.id = self.capacity_reservation_id = name
            self.owner_id = backend.account_id
            self.capacity_reservation_arn = (
                f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:capacity-reservation/{name}"
            )
            self.start_date = self.create_date = start
            self.end_date, self.end_date_type = end, "limited" if end else "unlimited"
            self.ebs_optimized = self.ephemeral_storage = False
            self.reservation_type, self.instance_match_criteria = "default", "open"
            self.instance_platform, self.tenancy = _PLATFORM, "default"
            self.placement_group_arn: str | None = None
            self.availability_zone = self.instance_type = ""
            self.total_instance_count = 0
            self.cancelled = False

        @property
        def state(self) -> str:
            now = datetime.now(UTC)
            if self.cancelled:
                return "cancelled"
            if self.end_date is not None and self.end_date <= now:
                return "expired"
            return "scheduled" if self.start_date > now else "active"

        @property
        def available_instance_count(self) -> int:
            if self.state != "active":
                return 0
            return max(0, self.total_instance_count - self.used())

        def used(self) -> int:
            """Return how many instances use a place, or have left it and are being cleaned up."""
            return sum(
                getattr(one, "capacity_reservation_id", None) == self.id and _uses_place(one)
                for one in self.ec2_backend.all_instances()
            )

        def matches(self, request: Request) -> bool:
            if self.state != "active" or (self.instance_type, self.availability_zone, self.tenancy) != (
                request.instance_type,
                request.zone,
                request.tenancy,
            ):
                return False
            # Only the owner of a group can name it; of another account's, the reservation leads there.
            own = f":{self.owner_id}:" in (self.placement_group_arn or "")
            group = (self.placement_group_arn or "").rpartition("/")[2] if own else ""
            return self.instance_platform == _PLATFORM and group in ("", request.placement_group)

    return CapacityReservation


def _uses_place(instance: Any) -> bool:
    if instance.state in ("stopped", "terminated"):
        left = getattr(instance, "_left_reservation", None)
        seconds = CONDITIONS.read().cleanup.get("reservations", 0.0)
        return left is not None and time.monotonic() - left < seconds
    return True


def _block(backend: Any, name: str, block: Block) -> Any:
    shown = _reservation_class()(backend, name, start=block.start, end=block.end)
    shown.reservation_type, shown.instance_match_criteria = "capacity-block", "targeted"
    shown.availability_zone, shown.instance_type = block.zone, block.type
    shown.total_instance_count = block.count
    return shown


def _create(response: Any) -> Any:
    from moto.ec2.utils import random_id

    get = response._get_param
    instance_type, zone = get("InstanceType"), get("AvailabilityZone")
    count = response._get_int_param("InstanceCount") or 0
    for name in ("InstanceType", "InstancePlatform", "InstanceCount"):
        if get(name) is None:
            client_error("MissingParameter", f"The request must contain the parameter {name}")
    if instance_type not in catalog.types():
        invalid_value(f"Invalid value '{instance_type}' for InstanceType.")
    if zone not in catalog.zones(response.ec2_backend.region_name, instance_type):
        client_error(
            "Unsupported", f"The instance type '{instance_type}' is not supported in the zone '{zone}'."
        )
    if not 1 <= count <= _MOST:
        invalid_value(
            f"{count} is an invalid value for InstanceCount. InstanceCount must be between 1 and {_MOST}."
        )
    end = _time(get("EndDate"))
    response.error_on_dryrun()
    tags = response._parse_tag_specification("capacity-reservation").get("capacity-reservation", {})
    backend = response.ec2_backend
    _take_capacity(zone, instance_type, count)
    made = _reservation_class()(backend, random_id(prefix="cr"), start=datetime.now(UTC), end=end)
    made.instance_type, made.availability_zone, made.total_instance_count = instance_type, zone, count
    made.instance_platform = get("InstancePlatform")
    made.tenancy = get("Tenancy") or "default"
    made.instance_match_criteria = get("InstanceMatchCriteria") or "open"
    made.placement_group_arn = get("PlacementGroupArn")
    made.add_tags(tags)
    _created(backend)[made.id] = made
    return result(CapacityReservation=made)


def assume(backend: Any, name: str, *, instance_type: str, count: int, zone: str) -> None:
    """Add an on-demand reservation with this id, as if it had been created before."""
    made = _reservation_class()(backend, name, start=datetime.now(UTC), end=None)
    made.instance_type, made.availability_zone, made.total_instance_count = instance_type, zone, count
    made.instance_match_criteria = "targeted"
    _created(backend)[name] = made


def _take_capacity(zone: str, instance_type: str, count: int) -> None:
    """Take capacity of the zone for the reservation. Its instances then take none."""
    available = CONDITIONS.capacity(zone, instance_type)
    if available is not None and available < count:
        client_error(
            "InsufficientInstanceCapacity",
            f"Insufficient capacity to reserve {count} {instance_type} in {zone}.",
        )
    CONDITIONS.use_capacity(zone, instance_type, count)


def _time(value: Any) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    found = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _describe(response: Any) -> Any:
    from moto.ec2.utils import generic_filter

    response.error_on_dryrun()
    backend = response.ec2_backend
    names = response._get_param("CapacityReservationIds", [])
    known = {**_created(backend), **_blocks(backend)}
    found = [_find(backend, name) for name in names] if names else list(known.values())
    filters = response._filters_from_querystring()
    return result(CapacityReservations=generic_filter(filters, found))


def _cancel(response: Any) -> Any:
    response.error_on_dryrun()
    found = _find(response.ec2_backend, response._get_param("CapacityReservationId"))
    if found.reservation_type != "default":
        client_error("UnsupportedOperation", f"The Capacity Block '{found.id}' cannot be cancelled.")
    if found.state in ("cancelled", "expired"):
        client_error("InvalidCapacityReservationState", f"The Capacity Reservation is {found.state}.")
    found.cancelled = True
    CONDITIONS.use_capacity(found.availability_zone, found.instance_type, -found.total_instance_count)
    return result(Return=True)


def request_of(market: str, instance_type: str, zone: str, count: int, group: Any) -> Request:
    """Return what the current RunInstances request needs of a reservation."""
    placement: Mapping[str, Any] = parameters().get("Placement") or {}
    return Request(
        instance_type=instance_type,
        zone=zone,
        count=count,
        market=market,
        tenancy=str(placement.get("Tenancy") or "default"),
        placement_group=group.group_name if group is not None else "",
    )
