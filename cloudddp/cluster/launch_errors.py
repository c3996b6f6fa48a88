"""What to do when EC2 does not launch the nodes: try the next zone, the next region, or stop. Pure.

The error classes are those of EC2's API reference, "Error codes for the Amazon EC2 API".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import AWSError, CloudDDPError, Message


class Next(Enum):
    """What to do after a failed launch."""

    ZONE = "zone"  # another zone may have what is short
    REGION = "region"  # a limit of this account in this region
    STOP = "stop"


_ZONE = frozenset(
    {
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
)
_REGION = frozenset(
    {
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "MaxSpotFleetRequestCountExceeded",
        "InsufficientAddressCapacity",
        "AddressLimitExceeded",
        "VolumeLimitExceeded",
        "OptInRequired",
    }
)


def next_step(code: str) -> Next:
    """Return what to do after an error code of RunInstances, or a reason code of an instance."""
    if code in _ZONE:
        return Next.ZONE
    return Next.REGION if code in _REGION else Next.STOP


@dataclass(frozen=True, slots=True)
class Attempt:
    """One zone or region where the nodes could not be launched, and why."""

    region: str
    zone: str  # '' if the region was excluded before a zone was tried
    code: str
    reason: str
    transient: bool = False  # AWS did not answer, or throttled a call
    what: str = ""  # type and market, where there are several

    @property
    def waiting_helps(self) -> bool:
        return self.transient or (next_step(self.code) is Next.ZONE and self.code != "Unsupported")


class NotLaunched(CloudDDPError):
    """No zone of a plan has launched the nodes. Others may: `attempts` says where that was tried.

    `remaining` are the zones of the plan that were not tried. `accepted`: AWS accepted a launch, which ended
    before the nodes were ready and costs at most `usd`.
    """

    def __init__(
        self,
        attempts: Sequence[Attempt],
        first: CloudDDPError,
        remaining: Sequence[str] = (),
        *,
        accepted: bool = False,
    ) -> None:
        super().__init__(first.message, hint=first.hint)
        self.attempts = tuple(attempts)
        self.first = first
        self.remaining = tuple(remaining)
        self.accepted = accepted
        self.usd = 0.0


def attempt(region: str, zone: str, error: CloudDDPError, what: str = "") -> Attempt:
    code = error.code if isinstance(error, AWSError) else ""
    transient = isinstance(error, AWSError) and error.transient and next_step(code) is Next.STOP
    return Attempt(region, zone, code, _sentence(error.message, code), transient, what)


def _sentence(message: str, code: str) -> str:
    """Return AWS's message without the call and the code, and without its advice."""
    text = message.partition(f"{code}: ")[2] if code and f"{code}: " in message else message
    return text.partition(". ")[0].rstrip(".")


def most_accepted(code: str) -> int:
    """Return how many launches that were accepted and ended for this reason are made, before waiting is given
    up.

    Each is billed, at least 60 s per node. A lack of capacity ends by itself; the other reasons may be
    permanent, such as a disk that EC2 cannot attach.
    """
    return 20 if code == "Server.InsufficientInstanceCapacity" else 3


def exhausted(
    what: str, attempts: Sequence[Attempt], waited: str = "", billed: str = "", *, wider: Sequence[str]
) -> CloudDDPError:
    """Return the error for a launch that failed in every zone, with a table of them. `what` is "2 x
    p5.48xlarge".

    `wider`: see `advice`.
    """
    after = f" within {waited}" if waited else ""
    places = [f"{one.what} {one.zone or one.region}".lstrip() for one in attempts]
    wide = max(map(len, places))
    codes = max(len(one.code) for one in attempts)
    rows = "".join(
        f"\n  {place:{wide}}  {one.code:{codes}}  {one.reason}".rstrip()
        for place, one in zip(places, attempts, strict=True)
    )
    more = f"\n  {billed}" if billed else ""
    return CloudDDPError(
        f"{what} could not be launched in any of these zones{after}:{rows}{more}",
        hint=advice(attempts, wider),
    )


def widening(spec: ClusterSpec) -> tuple[str, ...]:
    """Return the options that allow more places: without --zones, all zones of a region are tried, and
    without a placement group the nodes may be far apart."""
    if spec.reservation:
        return ()
    grouped = ["--no-placement-group"] * (spec.placement_group and spec.nodes > 1)
    return (*["--zones"] * bool(spec.zones), *["--subnets"] * bool(spec.subnets), "--regions", *grouped)


def advice(attempts: Sequence[Attempt], wider: Sequence[str]) -> str:
    """Return what to do when no attempt has succeeded. `wider` are options that can add places
    (`widening`)."""
    further = f"widen the search with {' or '.join(wider)}, " if wider else ""
    if any(one.waiting_helps for one in attempts):
        return f"keep trying with --wait-capacity 2h, {further}or choose another --instance-type"
    if any(next_step(one.code) is Next.REGION for one in attempts):
        return Message(
            "ask for a higher quota in the Service Quotas console, or use fewer nodes; `cloudddp doctor` "
            "names the quota"
        )
    return f"{further}or choose another --instance-type" if further else "choose another --reservation"
