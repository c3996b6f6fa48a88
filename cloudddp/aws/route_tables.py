"""Route tables: where packets from the nodes of a subnet go. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network

from cloudddp.aws.answers import Record
from cloudddp.aws.client import AWS
from cloudddp.text import one_line


class _Association(Record, frozen=True):
    subnet_id: str = ""
    main: bool = False


class _Route(Record, frozen=True):
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


class RouteTable(Record, frozen=True):
    vpc_id: str = ""
    associations: tuple[_Association, ...] = ()
    routes: tuple[_Route, ...] = ()


def listed(aws: AWS, vpc_id: str = "") -> list[RouteTable]:
    """Return the route tables of a VPC, or of all VPCs."""
    filters = [{"Name": "vpc-id", "Values": [vpc_id]}] if vpc_id else []
    return aws.listed("ec2", "describe_route_tables", "RouteTables", RouteTable, Filters=filters)


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
