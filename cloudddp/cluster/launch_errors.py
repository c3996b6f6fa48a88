"""What to do when EC2 does not launch the nodes: try the next zone, the next region, or stop. Pure.

The error classes are those of EC2's API reference, "Error codes for the Amazon EC2 API".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cloudddp.config.cluster_spec import Placement
from cloudddp.errors import AWSError, CloudDDPError, Message


class Next(Enum):
    """What to do after a failed launch."""

    ZONE = "zone"  # another zone may have what is short
    REGION = "region"  # a limit of this account in this region
    STOP = "stop"


_ZONE = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientCapacity",
    "UnfulfillableCapacity",
    "SpotMaxPriceTooLow",
    "ReservationCapacityExceeded",
    "InsufficientFreeAddressesInSubnet",
    "Unsupported",  # the zone does not offer the type
    # Reasons why an accepted instance terminated instead of running (StateReason of DescribeInstances).
    "Server.InsufficientInstanceCapacity",
    "Server.SpotInstanceTermination",
    "Server.InternalError",
}
_REGION = {
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "MaxSpotFleetRequestCountExceeded",
    "InsufficientAddressCapacity",
    "AddressLimitExceeded",
    "VolumeLimitExceeded",
    "OptInRequired",
}


def next_step(code: str) -> Next:
    """Return what to do after an error code of RunInstances, or a reason code of an instance."""
    if code in _ZONE:
        return Next.ZONE
    return Next.REGION if code in _REGION else Next.STOP


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """One zone or region where the nodes could not be launched, and why. `zone`: '' if the region was
    excluded before a zone was tried. `what`: type and market, where there are several."""

    region: str
    zone: str
    error: CloudDDPError
    what: str = ""

    @property
    def code(self) -> str:
        return self.error.code if isinstance(self.error, AWSError) else ""

    @property
    def transient(self) -> bool:
        """Whether AWS did not answer, or throttled a call."""
        return isinstance(self.error, AWSError) and self.error.transient and next_step(self.code) is Next.STOP

    @property
    def waiting_helps(self) -> bool:
        return self.transient or (next_step(self.code) is Next.ZONE and self.code != "Unsupported")

    @property
    def reason(self) -> str:
        """AWS's message without the call and the code, and without its advice."""
        text = self.error.message
        if self.code and f"{self.code}: " in text:
            text = text.partition(f"{self.code}: ")[2]
        return text.partition(". ")[0].rstrip(".")


class NotLaunched(CloudDDPError):
    """No zone of a plan has launched the nodes. Others may: `attempts` says where that was tried.

    `accepted`: AWS accepted a launch, in the last zone that was tried, which ended before the nodes were
    ready and costs at most `usd`.
    """

    def __init__(self, *attempts: LaunchAttempt, accepted: bool = False) -> None:
        super().__init__(attempts[0].error.message, hint=attempts[0].error.hint)
        self.attempts = attempts
        self.accepted = accepted
        self.usd = 0.0


def exhausted(
    spec: Placement, attempts: Sequence[LaunchAttempt], waited: str = "", billed: str = ""
) -> CloudDDPError:
    """Return the error for a launch that failed in every zone, with a table of them."""
    after = f" within {waited}" if waited else ""
    places = [f"{attempt.what} {attempt.zone or attempt.region}".lstrip() for attempt in attempts]
    wide = max(map(len, places))
    codes = max(len(attempt.code) for attempt in attempts)
    rows = "".join(
        f"\n  {place:{wide}}  {one.code:{codes}}  {one.reason}".rstrip()
        for place, one in zip(places, attempts, strict=True)
    )
    more = f"\n  {billed}" if billed else ""
    return CloudDDPError(
        f"{spec.title} could not be launched in any of these zones{after}:{rows}{more}",
        hint=advice(spec, attempts),
    )


def advice(spec: Placement, attempts: Sequence[LaunchAttempt]) -> str:
    """Return what to do when no attempt has succeeded. Options that allow more places: without --zones, all
    zones of a region are tried, and without a placement group the nodes may be far apart."""
    wider = [
        *["--zones"] * bool(spec.zones),
        *["--subnets"] * bool(spec.subnets),
        "--regions",
        *["--no-placement-group"] * (spec.placement_group and spec.nodes > 1),
    ]
    further = "" if spec.reservation else f"widen the search with {' or '.join(wider)}, "
    if any(attempt.waiting_helps for attempt in attempts):
        return f"keep trying with --wait-capacity 2h, {further}or choose another --instance-type"
    if any(next_step(attempt.code) is Next.REGION for attempt in attempts):
        return Message(
            "ask for a higher quota in the Service Quotas console, or use fewer nodes; `cloudddp doctor` "
            "names the quota"
        )
    return f"{further}or choose another --instance-type" if further else "choose another --reservation"
