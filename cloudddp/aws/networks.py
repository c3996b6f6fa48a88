"""Networks: the subnets in which a cluster's nodes may be launched, in the order in which to try them.
Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from msgspec import field

from cloudddp.aws import internet_access
from cloudddp.aws.answers import Answer, Count, Id, Tagged
from cloudddp.aws.client import AWS
from cloudddp.aws.internet_access import PublicAccessBlock, RouteTable, public_access_block, table_of
from cloudddp.config.cluster_spec import Placement
from cloudddp.errors import CloudDDPError, UsageError, q
from cloudddp.text import one_line, some

_LISTED = 12  # subnets in an error message
# What reaches nodes without a public address, to continue a hint.
_PRIVATE = (
    "connect to private addresses (docs/connections.md): --connect private --ssh-from BLOCK with a VPN, "
    "--proxy-jump USER@HOST through a jump host"
)
_BLOCK_PUBLIC_ACCESS = "VPC Block Public Access"


class _Vpc(Tagged, frozen=True):
    vpc_id: Id
    is_default: bool = False

    @property
    def described(self) -> str:
        name = one_line(self.tag("Name") or "", 60)
        shown = ", ".join(filter(None, (name, "default" if self.is_default else "")))
        return self.vpc_id + (f" ({shown})" if shown else "")


class _Offering(Answer, frozen=True):
    location: Id


class Subnet(Tagged, frozen=True):
    """One subnet as AWS describes it. Every text but the tags is safe to print."""

    id: Id = field(name="SubnetId")
    vpc_id: Id
    zone: Id = field(name="AvailabilityZone")
    free: Count = field(name="AvailableIpAddressCount")  # private addresses
    block: str = field(name="CidrBlock", default="")  # its IPv4 addresses
    default: bool = field(name="DefaultForAz", default=False)  # the zone's default subnet
    assigns_public: bool = field(name="MapPublicIpOnLaunch", default=False)  # addresses to new instances

    @property
    def described(self) -> str:
        tag = self.tag("Name")
        name = f", {one_line(tag, 60)}" if tag else ""
        return f"{self.id} ({self.vpc_id}, {self.zone}, {self.free} free addresses{name})"


def candidates(aws: AWS, spec: Placement, *, reached_from: Sequence[str]) -> tuple[Subnet, ...]:
    """Return one subnet per zone, in the order in which to try them.

    Each is in a zone that offers the type, has an address for every node, and has a route through an internet
    gateway to the address blocks of `reached_from`, from which SSH comes, that VPC Block Public Access leaves
    open; an empty one requires no route. Makes three to six AWS calls. Raises UsageError if the settings
    exclude every subnet or lack a VPC, CloudDDPError if too few addresses are free.
    """
    vpc_id = _vpc(aws, spec)
    found = _subnets(aws, vpc_id)
    if vpc_id is None and not spec.subnets:
        raise _no_default_vpc(aws, found, reached_from)
    chosen = _in_order(spec, found, aws.region) if spec.subnets else found
    chosen = _in_zones(spec, chosen, aws.region)
    chosen = _offered(spec, chosen, zones_offering(aws, spec.instance_type), aws.region)
    if reached_from:
        chosen = _reachable(aws, chosen, reached_from)
    return _one_per_zone(_large(spec, chosen))


def _vpc(aws: AWS, spec: Placement) -> str | None:
    """Return the id of the VPC; None if it follows from the subnets, or if there is no default VPC."""
    if spec.vpc is None and spec.subnets:
        return None
    filters = _selector(spec.vpc) if spec.vpc else {"Name": "is-default", "Values": ["true"]}
    found = [one.vpc_id for one in aws.listed("describe_vpcs", _Vpc, Filters=[filters])]
    if spec.vpc and not found:
        raise UsageError(f"there is no VPC {spec.vpc} in {aws.region}", hint=f"available: {_vpcs(aws)}")
    if len(found) > 1:
        raise UsageError(
            f"{spec.vpc} selects {len(found)} VPCs in {aws.region}: {some(found, _LISTED)}",
            hint="give the id of one of them: --vpc vpc-...",
        )
    return found[0] if found else None


def _vpcs(aws: AWS) -> str:
    """Return the VPCs of the region with their names, for a message. One AWS call."""
    found = aws.listed("describe_vpcs", _Vpc)
    return some([one.described for one in found], _LISTED) or "none; try another region"


def _selector(value: str) -> dict[str, Any]:
    """Return the filter for a VPC's id, or for tag:KEY=VALUE."""
    if value.startswith("tag:"):
        key, _, content = value.partition("=")
        return {"Name": key, "Values": [content]}
    return {"Name": "vpc-id", "Values": [value]}


def _subnets(aws: AWS, vpc_id: str | None) -> list[Subnet]:
    """Return the subnets of a VPC, or of all VPCs, by zone: those that assign public addresses first."""
    filters: list[dict[str, Any]] = [{"Name": "state", "Values": ["available"]}]
    if vpc_id:
        filters.append({"Name": "vpc-id", "Values": [vpc_id]})
    found = aws.listed("describe_subnets", Subnet, Filters=filters)
    return sorted(found, key=lambda s: (s.zone, not s.assigns_public, not s.default, s.id))


def _no_default_vpc(aws: AWS, found: Sequence[Subnet], reached_from: Sequence[str]) -> UsageError:
    """Return the error that lists the subnets and which of them are public, so that the suggested one works.

    Makes one AWS call, or up to three.
    """
    head = f"this account has no default VPC in {aws.region}"
    if not found:
        return UsageError(
            f"{head}, and no subnet",
            hint=f"create a default VPC: `aws ec2 create-default-vpc --region {q(aws.region)}`; or try "
            "another region",
        )
    reach = _routes(aws, found, reached_from)
    words = {one.id: f"private, {reach.route(one)}" for one in found}
    words |= {one.id: f"blocked by {_BLOCK_PUBLIC_ACCESS}" for one in reach.routed}
    words |= {one.id: "public" for one in reach.public}
    in_order = (*reach.public, *(one for one in found if one not in reach.public))
    listed = [f"{one.described}: {words[one.id]}" for one in in_order]
    more = [f"and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
    message = f"{head}; its subnets: {'; '.join(listed[:_LISTED] + more)}"
    if reached_from and not reach.public:
        return UsageError(
            message, hint=f"none of these subnets is public: give --vpc {found[0].vpc_id}, and {_PRIVATE}"
        )
    first = reach.public[0] if reached_from else found[0]
    return UsageError(message, hint=f"give a VPC or subnets: --vpc {first.vpc_id}, or --subnets {first.id}")


def _listed(found: Sequence[Subnet]) -> str:
    return some([one.described for one in found], _LISTED)


def _in_order(spec: Placement, found: Sequence[Subnet], region: str) -> list[Subnet]:
    """Return the subnets that the settings name, in their order. Raises UsageError for one that does not
    exist."""
    chosen: list[Subnet] = []
    for wanted in spec.subnets:
        named = [one for one in found if _matches(one, wanted)]
        if not named:
            where = f"VPC {spec.vpc} in {region}" if spec.vpc else region
            raise UsageError(
                f"there is no subnet {wanted} in {where}", hint=f"available: {_listed(found) or 'none'}"
            )
        chosen += [one for one in named if one not in chosen]
    vpcs = sorted({one.vpc_id for one in chosen})
    if len(vpcs) > 1:
        raise UsageError(
            f"the subnets are in {len(vpcs)} VPCs: {_listed(chosen)}",
            hint="a cluster's security group belongs to one VPC: give subnets of one VPC, or --vpc as well",
        )
    return chosen


def _matches(subnet: Subnet, wanted: str) -> bool:
    if wanted.startswith("tag:"):
        key, _, value = wanted.removeprefix("tag:").partition("=")
        return subnet.tag(key) == value
    return subnet.id == wanted


def _in_zones(spec: Placement, found: Sequence[Subnet], region: str) -> list[Subnet]:
    if not found:
        raise UsageError(f"VPC {spec.vpc} has no subnet in {region}", hint="give another --vpc")
    if not spec.zones:
        return list(found)
    known = {one.zone for one in found}
    # With several regions, the setting names zones of all of them: those of this one count.
    own = [
        zone
        for zone in spec.zones
        if not any(_is_in(zone, other) for other in spec.regions if other != region)
    ]
    unknown = [zone for zone in own if zone not in known]
    if unknown or not own:
        ids = ", ".join(one.id for one in found[:_LISTED])
        where = f"none of the subnets {ids}" if spec.subnets else f"no subnet of {found[0].vpc_id}"
        raise UsageError(
            f"{where} is in zone {' or '.join(unknown or spec.zones)}",
            hint=f"zones: {_names(known)}",
        )
    return sorted((one for one in found if one.zone in own), key=lambda s: own.index(s.zone))


def _is_in(zone: str, region: str) -> bool:
    """Return whether a zone's name is one of a region: us-west-2a, and the local zone us-west-2-lax-1a."""
    return zone.startswith(region) and not zone[len(region) : len(region) + 1].isdigit()


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def zones_offering(aws: AWS, instance_type: str) -> set[str]:
    """Return the zones of the region that offer a type. One AWS call."""
    found = aws.listed(
        "describe_instance_type_offerings",
        _Offering,
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance_type]}],
    )
    return {offering.location for offering in found}


def _offered(spec: Placement, found: Sequence[Subnet], offered: set[str], region: str) -> list[Subnet]:
    chosen = [one for one in found if one.zone in offered]
    if not chosen:
        where = f"zone {' or '.join(spec.zones)}"
        if not spec.zones:
            where = f"a zone that has a subnet here ({_names(one.zone for one in found)})"
        raise UsageError(
            f"{spec.instance_type} is not offered in {where}",
            hint=f"offered in: {_names(offered) or f'no zone of {region}'}",
        )
    return chosen


@dataclass(frozen=True, slots=True)
class _Routes:
    """Which subnets have a route through an internet gateway, and which of these the account leaves open to
    connections from outside, `blocked` being what it blocks."""

    routed: list[Subnet]
    public: list[Subnet]
    blocked: PublicAccessBlock | None
    tables: Sequence[RouteTable]

    def route(self, subnet: Subnet) -> str:
        """Return the subnet's default route, in words."""
        return internet_access.default_route(table_of(subnet.id, subnet.vpc_id, self.tables))


def _routes(aws: AWS, found: Sequence[Subnet], blocks: Sequence[str], vpc_id: str = "") -> _Routes:
    """Return which subnets are reached from one of the address blocks; without any, what is routed is open.
    One AWS call, or up to three."""
    tables = internet_access.route_tables(aws, vpc_id)
    addresses = [ip_network(one, strict=False).network_address for one in blocks or ("0.0.0.0/0",)]
    routed = [
        one
        for one in found
        for table in [table_of(one.id, one.vpc_id, tables)]
        if any(internet_access.leaves_by_gateway(table, address) for address in addresses)
    ]
    blocked = public_access_block(aws) if routed and blocks else None
    excluded = blocked.excluded if blocked else frozenset()
    public = [one for one in routed if blocked is None or excluded & {one.id, one.vpc_id}]
    return _Routes(routed, public, blocked, tables)


def _reachable(aws: AWS, found: Sequence[Subnet], blocks: Sequence[str]) -> list[Subnet]:
    """Return the subnets whose nodes answer at a public address: replies leave through an internet gateway.

    A node in any other subnet has no way to reply, also with a public address (Amazon VPC User Guide, "Enable
    internet access for a VPC using an internet gateway").
    """
    reach = _routes(aws, found, blocks, found[0].vpc_id)
    if reach.public:
        return reach.public
    if reach.blocked is None:
        raise UsageError(
            "no subnet has a route to an internet gateway, so SSH cannot reach public addresses there: "
            + "; ".join(f"{one.described}: {reach.route(one)}" for one in found[:_LISTED]),
            hint=f"give a public subnet with --subnets; or {_PRIVATE}",
        )
    exclude = "; your organization allows no exclusions"
    if reach.blocked.exclusions_allowed:
        exclude = (
            "; or exclude one from it, which takes some minutes: `aws ec2 "
            f"create-vpc-block-public-access-exclusion --region {q(aws.region)} --subnet-id "
            f"{q(reach.routed[0].id)} --internet-gateway-exclusion-mode allow-bidirectional`"
        )
    raise UsageError(
        f"{_BLOCK_PUBLIC_ACCESS} is {reach.blocked.mode} in {aws.region}, so SSH cannot reach public "
        f"addresses in {_listed(reach.routed)}",
        hint=f"give a subnet that is excluded from it with --subnets; or {_PRIVATE}{exclude}",
    )


def _large(spec: Placement, found: Sequence[Subnet]) -> list[Subnet]:
    chosen = [one for one in found if one.free >= spec.nodes]
    if not chosen:
        raise CloudDDPError(
            f"no subnet has {spec.nodes} free addresses: {_listed(found)}",
            hint="give larger --subnets, or fewer --nodes",
        )
    return chosen


def _one_per_zone(found: Sequence[Subnet]) -> tuple[Subnet, ...]:
    """Return the first subnet of each zone: capacity depends on the zone, not on the subnet."""
    first: dict[str, Subnet] = {}
    for one in found:
        first.setdefault(one.zone, one)
    return tuple(first.values())
