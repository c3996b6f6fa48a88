"""How a subnet of moto reaches addresses outside its VPC: by an internet gateway, by a NAT gateway, or not at
all.

The most specific active route of the subnet's table decides ("Route priority",
https://docs.aws.amazon.com/vpc/latest/userguide/route-tables-priority.html). Reads moto's objects and changes
none.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WayOut:
    """What the route to an address leads to. `nat` is the public address of a NAT gateway, or None."""

    gateway: bool = False
    nat: str | None = None


def way_out(backend: Any, subnet: Any, destination: str) -> WayOut:
    """Return the way from a subnet to an address outside its VPC."""
    route = _route(_table(backend, subnet), ipaddress.IPv4Address(destination))
    if route is None or route.state != "active":
        return WayOut()
    if str(getattr(route.gateway, "id", "")).startswith("igw-"):
        return WayOut(gateway=True)
    if route.nat_gateway is not None:
        return WayOut(nat=_nat_address(backend, route.nat_gateway, destination))
    return WayOut()


def _table(backend: Any, subnet: Any) -> Any | None:
    """Return the subnet's own route table, else the main one of its VPC."""
    tables = [one for one in list(backend.route_tables.values()) if one.vpc_id == subnet.vpc_id]
    own = [one for one in tables if subnet.id in list(one._associations.values())]
    return next(iter([*own, *(one for one in tables if one.main_association_id)]), None)


def _route(table: Any | None, destination: ipaddress.IPv4Address) -> Any | None:
    found = []
    for route in table.routes if table is not None else ():
        try:
            network = ipaddress.IPv4Network(route.destination_cidr_block or "", strict=False)
        except ValueError:  # IPv6, or a prefix list
            continue
        if destination in network and not route.local:
            found.append((network.prefixlen, route))
    return max(found, key=lambda one: one[0])[1] if found else None


def _nat_address(backend: Any, nat: Any, destination: str) -> str | None:
    """Return the public address of a NAT gateway that itself has a way out through an internet gateway."""
    if nat.connectivity_type == "private":  # None is EC2's default, public
        return None
    subnet = next(
        (s for zone in list(backend.subnets.values()) for s in zone.values() if s.id == nat.subnet_id), None
    )
    route = (
        _route(_table(backend, subnet), ipaddress.IPv4Address(destination)) if subnet is not None else None
    )
    if route is None or not str(getattr(route.gateway, "id", "")).startswith("igw-"):
        return None
    return next((one["publicIp"] for one in nat.address_set if one.get("publicIp")), None)
