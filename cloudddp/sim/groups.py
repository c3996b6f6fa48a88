"""What moto knows of security groups, as the router's policy. Reads moto's objects, changes none.

What the policy holds becomes part of a text that the kernel's firewall reads, so that nothing passes here but ids,
addresses and numbers: one odd rule must neither say more than it may nor keep all others from being put into force.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from cloudddp.sim.router import Member, Policy, Rule

_ID = re.compile(r"[A-Za-z0-9-]+")
_PROTOCOL = re.compile(r"-1|tcp|udp|icmp|[0-9]{1,3}")  # icmpv6 has nobody here to reach


def policy(instances: Iterable[Any]) -> Policy:
    """The policy for these instances (moto's): their own groups, and the rules of those.

    A rule that names a group lets that group's members through, by their private addresses, as on EC2. A node has
    its primary interface only, so that the groups of others have nothing to decide.
    """
    members, groups = [], {}
    for instance in instances:
        primary = instance.nics.get(0)
        if primary is None:
            continue
        for group in primary.group_set:
            groups[group.id] = group
        names = tuple(sorted(group.id for group in primary.group_set))
        members.append(Member(instance.private_ip, instance.public_ip, names, instance.vpc_id or ""))
    return Policy(
        members=tuple(sorted(members, key=lambda member: member.private)),
        ingress={name: _rules(group.ingress_rules) for name, group in sorted(groups.items())},
        egress={name: _rules(group.egress_rules) for name, group in sorted(groups.items())},
    )


def _rules(listed: Iterable[Any]) -> tuple[Rule, ...]:
    read = (_rule(rule) for rule in listed)
    return tuple(rule for rule in read if rule is not None)


def _rule(rule: Any) -> Rule | None:
    """None where nobody here is meant (IPv6, a prefix list), or where it is no rule that EC2 would have kept."""
    network, group = _network(rule.cidr_ipv4), (rule.source_group or {}).get("GroupId")
    protocol, first, last = str(rule.ip_protocol), rule.from_port, rule.to_port
    if not _PROTOCOL.fullmatch(protocol) or not _are_ports(protocol, first, last):
        return None
    if group and not _ID.fullmatch(str(group)):
        return None
    if not network and not group:
        return None
    return Rule(
        protocol=protocol,
        first=first,
        last=last,
        networks=(network,) if network else (),
        groups=(group,) if group else (),
    )


def _are_ports(protocol: str, first: Any, last: Any) -> bool:
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
