"""What moto knows of security groups, as the router's policy. Reads moto's objects, changes none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cloudddp.sim.router import Member, Policy, Rule


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
    found = []
    for rule in listed:
        network = rule.cidr_ipv4
        group = (rule.source_group or {}).get("GroupId")
        if rule.ip_protocol == "icmpv6":
            continue  # as with an IPv6 range or a prefix list: nobody here has such an address
        if network or group:
            found.append(
                Rule(
                    protocol=str(rule.ip_protocol),
                    first=rule.from_port,
                    last=rule.to_port,
                    networks=(network,) if network else (),
                    groups=(group,) if group else (),
                )
            )
    return tuple(found)
