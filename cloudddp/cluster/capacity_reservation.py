"""A cluster in a capacity reservation: checks before anything is created, and the deadline that a block
sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cloudddp.aws import reservations
from cloudddp.aws.client import AWS
from cloudddp.aws.reservations import Reservation
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, UsageError

BLOCK_END = timedelta(minutes=30)
"""EC2 begins to terminate the instances of a capacity block this long before the block's end (EC2 User Guide,
"Monitor Capacity Blocks using EventBridge")."""

TIME_TO_SAVE = timedelta(minutes=10)
"""The nodes' own deadline is this much earlier: powering off lets ranks save a snapshot, and EC2's
termination may not. EC2 gives the same time: its warning comes 40 minutes before the end of the block."""


def check_settings(spec: ClusterSpec) -> None:
    """Raise UsageError for settings that a reservation excludes. Calls nothing."""
    if spec.reservation and spec.spot:
        raise UsageError(
            f"spot instances cannot use the capacity reservation {spec.reservation}",
            hint="omit --spot, or --reservation",
        )


def find(aws: AWS, spec: ClusterSpec) -> Reservation | None:
    """Return the reservation of the settings, checked except for its platform; None where they name none.

    Raises UsageError for settings that do not match it, CloudDDPError if it has no room. One AWS call, two
    where it has too few instances available.
    """
    if spec.reservation is None:
        return None
    found = reservations.find(aws, spec.reservation)
    name = title(found)
    if found.instance_type != spec.instance_type:
        raise UsageError(
            f"{name} is for {found.instance_type}, and {spec.instance_type} was requested",
            hint=f"give --instance-type {found.instance_type}",
        )
    if spec.zones and found.zone not in spec.zones:
        raise UsageError(
            f"{name} is in zone {found.zone}, not in {' or '.join(spec.zones)}",
            hint=f"give --zones {found.zone}",
        )
    if found.tenancy != "default":
        raise UsageError(
            f"{name} has tenancy {found.tenancy}, and nodes are launched with tenancy default",
            hint="use a reservation with tenancy default",
        )
    _check_state(found)
    _check_room(aws, found, spec)
    return found


def check_platform(found: Reservation | None, platform: str) -> None:
    """Raise UsageError if the reservation is for another platform than the image, such as Windows."""
    if found is not None and found.platform != platform:
        raise UsageError(
            f"{title(found)} is for platform {found.platform}, and the image is for {platform}",
            hint="give another --image, or a reservation for the image's platform",
        )


def title(found: Reservation) -> str:
    return f"capacity {'block' if found.block else 'reservation'} {found.id}"


def latest_end(found: Reservation) -> datetime | None:
    """Return until when the nodes may live; None for an on-demand reservation: its instances continue after
    its end."""
    return found.end - BLOCK_END - TIME_TO_SAVE if found.block and found.end else None


def _check_state(found: Reservation) -> None:
    if found.state == "active":
        return
    when = f"; it starts at {found.start.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if found.start else ""
    raise CloudDDPError(
        f"{title(found)} is {found.state}, not active{when if found.state == 'scheduled' else ''}",
        hint="repeat the command when it is active"
        if found.state in ("scheduled", "pending", "payment-pending")
        else "give another --reservation, or omit it for on-demand capacity",
    )


def _check_room(aws: AWS, found: Reservation, spec: ClusterSpec) -> None:
    """Raise CloudDDPError if the reservation has too few instances available.

    Instances that have ended are available again after some minutes of clean-up, so for those the launch
    waits.
    """
    if found.available >= spec.nodes:
        return
    if found.total < spec.nodes:
        raise UsageError(
            f"{title(found)} is for {found.total} instance{'s' * (found.total != 1)}, and {spec.nodes} were "
            "requested",
            hint=f"give --nodes {found.total}, or enlarge the reservation",
        )
    running = reservations.used(aws, found.id)
    if found.total - running < spec.nodes:
        raise CloudDDPError(
            f"{title(found)} has {found.available} of {found.total} instances available, and {spec.nodes} "
            "were requested",
            hint=f"terminate instances that use it ({running} in this account), or give fewer --nodes",
        )
