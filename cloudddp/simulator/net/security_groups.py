"""Translates moto's security groups and routes to the router's policy. Reads moto's objects and changes none.

The most specific active route of a subnet's table decides how it reaches addresses outside its VPC: by an
internet gateway, by a NAT gateway, or not at all ("Route priority",
https://docs.aws.amazon.com/vpc/latest/userguide/route-tables-priority.html). The policy becomes part of the
text that `nft` parses, so only ids, addresses and numbers pass: a malformed rule must neither inject anything
nor prevent the others from taking effect.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloudddp.simulator.ec2 import public_access
from cloudddp.simulator.net.policy import LAPTOP, PUBLIC, Member, Policy, Rule

_POOL = PUBLIC.partition("/")[0]  # stands for all public addresses but the laptop's
_ID = re.compile(r"[A-Za-z0-9-]+")
_PROTOCOL = re.compile(r"-1|tcp|udp|icmp|[0-9]{1,3}")  # not icmpv6: nodes have no IPv6


def policy_for(instances: Iterable[Any], vpn: Mapping[str, str] | None = None) -> Policy:
    """Return the policy for these instances of moto: their groups, the rules of those, and their routes.

    A rule that names a group allows the private addresses of that group's members, as on EC2. A node has its
    primary interface only, so the groups of other interfaces are ignored.
    """
    members, groups = [], {}
    for instance in instances:
        primary = instance.nics.get(0)
        if primary is None:
            continue
        for group in primary.group_set:
            groups[group.id] = group
        names = tuple(sorted(group.id for group in primary.group_set))
        members.append(_member(instance, primary, names))
    return Policy(
        members=tuple(sorted(members, key=lambda member: member.private)),
        ingress={name: _rules(group.ingress_rules) for name, group in sorted(groups.items())},
        egress={name: _rules(group.egress_rules) for name, group in sorted(groups.items())},
        vpn={vpc: address for vpc, address in (vpn or {}).items() if _ID.fullmatch(vpc)},
    )


def _member(instance: Any, interface: Any, groups: tuple[str, ...]) -> Member:
    public = instance.public_ip or None
    backend, subnet = interface.subnet.ec2_backend, interface.subnet
    out, back = _way_out(backend, subnet, _POOL), _way_out(backend, subnet, LAPTOP)
    ways = public_access.ways(backend, subnet)
    return Member(
        private=instance.private_ip,
        public=public,
        groups=groups,
        vpc=instance.vpc_id or "",
        source=(public if "out" in ways else None) if out.gateway else out.nat,
        answers_public=out.gateway and "in" in ways,
        answers_laptop=back.gateway and "in" in ways,
    )


@dataclass(frozen=True, slots=True)
class _WayOut:
    """What the route to an address leads to. `nat` is the public address of a NAT gateway, or None."""

    gateway: bool = False
    nat: str | None = None


def _way_out(backend: Any, subnet: Any, destination: str) -> _WayOut:
    """Return the way from a subnet to an address outside its VPC."""
    route = _route(_table(backend, subnet), ipaddress.IPv4Address(destination))
    if route is None or route.state != "active":
        return _WayOut()
    if str(getattr(route.gateway, "id", "")).startswith("igw-"):
        return _WayOut(gateway=True)
    if route.nat_gateway is not None:
        return _WayOut(nat=_nat_address(backend, route.nat_gateway, destination))
    return _WayOut()


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
    if "nat" not in public_access.ways(backend, subnet):
        return None
    return next((one["publicIp"] for one in nat.address_set if one.get("publicIp")), None)


def _rules(listed: Iterable[Any]) -> tuple[Rule, ...]:
    rules = (_rule(rule) for rule in listed)
    return tuple(rule for rule in rules if rule is not None)


def _rule(rule: Any) -> Rule | None:
    """Return None for peers that the lab does not have (IPv6, prefix lists), and for rules that EC2 would
    reject."""
    network, group = _network(rule.cidr_ipv4), (rule.source_group or {}).get("GroupId")
    protocol, first, last = str(rule.ip_protocol), rule.from_port, rule.to_port
    if not _PROTOCOL.fullmatch(protocol) or not _valid_ports(protocol, first, last):
        return None
    if group and not _ID.fullmatch(str(group)):
        return None
    if not network and not group:
        return None
    return Rule(
        protocol=protocol,
        from_port=first,
        to_port=last,
        networks=(network,) if network else (),
        groups=(group,) if group else (),
    )


def _valid_ports(protocol: str, first: Any, last: Any) -> bool:
    if first is None and last is None:
        return True
    if not isinstance(first, int) or not isinstance(last, int):
        return False
    if protocol in ("tcp", "udp"):
        return 0 <= first <= last <= 65535
    return all(-1 <= number <= 255 for number in (first, last))


def _network(text: Any) -> str:
    try:
        return str(ipaddress.IPv4Network(text, strict=False)) if text else ""
    except ValueError:
        return ""
