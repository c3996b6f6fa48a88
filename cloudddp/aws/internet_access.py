"""Whether the nodes of a subnet reach the internet, and are reached from it: its route table decides, and VPC
Block Public Access, a setting of an account and region that keeps the internet from subnets whatever their
routes are. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network

from cloudddp.aws import denials
from cloudddp.aws.answers import Answer
from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError
from cloudddp.text import one_line


class _Association(Answer, frozen=True):
    subnet_id: str = ""
    main: bool = False


class _Route(Answer, frozen=True):
    """A route. Without an address block it is one of a prefix list."""

    destination_cidr_block: str = ""
    destination_ipv6_cidr_block: str = ""
    state: str = "active"
    gateway_id: str = ""
    nat_gateway_id: str = ""
    transit_gateway_id: str = ""
    network_interface_id: str = ""
    vpc_peering_connection_id: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for what is no address block."""
        if block := self.block:
            ip_network(block, strict=False)

    @property
    def block(self) -> str:
        return self.destination_cidr_block or self.destination_ipv6_cidr_block


class RouteTable(Answer, frozen=True):
    vpc_id: str = ""
    associations: tuple[_Association, ...] = ()
    routes: tuple[_Route, ...] = ()


def route_tables(aws: AWS, vpc_id: str = "") -> list[RouteTable]:
    """Return the route tables of a VPC, or of all VPCs."""
    filters = [{"Name": "vpc-id", "Values": [vpc_id]}] if vpc_id else []
    return aws.listed("describe_route_tables", RouteTable, Filters=filters)


def table_of(subnet_id: str, vpc_id: str, tables: Sequence[RouteTable]) -> RouteTable:
    """Return the route table of a subnet: its own, else the main one of its VPC."""
    main = RouteTable()
    for table in tables:
        for association in table.associations:
            if association.subnet_id == subnet_id:
                return table
            if association.main and table.vpc_id in ("", vpc_id):
                main = table
    return main


def leaves_by_gateway(table: RouteTable, address: IPv4Address | IPv6Address) -> bool:
    """Return whether the most specific active route to an address leads to an internet gateway."""
    best, gateway = -1, ""
    for route in table.routes:
        if not route.block or route.state != "active":  # a prefix list, or a target that is gone
            continue
        network = ip_network(route.block, strict=False)
        if network.version == address.version and address in network and network.prefixlen > best:
            best, gateway = network.prefixlen, route.gateway_id
    return gateway.startswith("igw-")


def default_route(table: RouteTable) -> str:
    """Return what the route table does with other addresses, for a message."""
    for route in table.routes:
        if route.destination_cidr_block != "0.0.0.0/0":
            continue
        target = (
            route.gateway_id
            or route.nat_gateway_id
            or route.transit_gateway_id
            or route.network_interface_id
            or route.vpc_peering_connection_id
            or "an unknown target"
        )
        gone = " (blackhole)" if route.state == "blackhole" else ""
        return one_line(f"0.0.0.0/0 goes to {target}{gone}", 100)
    return "no default route (0.0.0.0/0)"


# Both block connections from outside; block-ingress leaves NAT gateways a way out.
_BLOCKING = ("block-bidirectional", "block-ingress")
_UNKNOWN_CALL = ("InvalidAction", "UnsupportedOperation")  # of a partition or an endpoint without the feature
# The other exclusion, allow-egress, is for connections from inside.
_OPEN = "allow-bidirectional"
_NOT_IN_FORCE = ("create-in-progress", "create-failed", "delete-complete", "disable-complete")


class _BlockOptions(Answer, frozen=True):
    internet_gateway_block_mode: str = "off"
    exclusions_allowed: str = "allowed"


class _Exclusion(Answer, frozen=True):
    resource_arn: str = ""
    internet_gateway_exclusion_mode: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class PublicAccessBlock:
    """What blocks SSH from public addresses in a region. `excluded`: the ids of the VPCs and subnets that it
    leaves open."""

    mode: str
    exclusions_allowed: bool  # the organization may forbid them
    excluded: frozenset[str]


def public_access_block(aws: AWS) -> PublicAccessBlock | None:
    """Return what the account blocks; None if it blocks nothing, or does not let the caller know. One AWS
    call, or two.

    Raises AWSError.
    """
    try:
        options = aws.read(
            "ec2", "describe_vpc_block_public_access_options", _BlockOptions, "VpcBlockPublicAccessOptions"
        )
        if options.internet_gateway_block_mode not in _BLOCKING:
            return None
        exclusions = aws.listed("describe_vpc_block_public_access_exclusions", _Exclusion)
    except AWSError as error:
        if error.code in (*denials.CODES, *_UNKNOWN_CALL):
            return None
        raise
    return PublicAccessBlock(
        options.internet_gateway_block_mode,
        options.exclusions_allowed != "not-allowed",
        frozenset(
            exclusion.resource_arn.rpartition("/")[2]
            for exclusion in exclusions
            if exclusion.internet_gateway_exclusion_mode == _OPEN and exclusion.state not in _NOT_IN_FORCE
        ),
    )
