"""The rules of security groups: validates and normalizes them as EC2 does.

moto accepts any text as a protocol, a port or a network. The rules are enforced in net/.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2 import security_groups
from cloudddp.simulator.ec2.patch import client_error, invalid_value, override

_PROTOCOL_NAMES = {"6": "tcp", "17": "udp", "1": "icmp", "58": "icmpv6"}
_WITH_PORTS = ("tcp", "udp", "icmp", "icmpv6")
_NETWORKS: dict[str, type[ipaddress.IPv4Network | ipaddress.IPv6Network]] = {
    "CidrIp": ipaddress.IPv4Network,
    "CidrIpv6": ipaddress.IPv6Network,
}


def install() -> None:
    """Patch moto's reading and creation of rules."""
    from moto.ec2.models.security_groups import SecurityGroupRule
    from moto.ec2.responses.security_groups import SecurityGroups

    override(SecurityGroups, "_process_rules_from_querystring", _parse)
    override(SecurityGroupRule, "__init__", _create)
    for side in ("ingress", "egress"):
        override(SecurityGroups, f"authorize_security_group_{side}", _authorize)


def normalize(protocol: Any, first: Any, last: Any) -> tuple[str, int | None, int | None]:
    """Return protocol and ports as EC2 shows them: by name if it has one, and without meaningless ports."""
    name = _protocol(protocol)
    if name not in _WITH_PORTS:
        return name, None, None
    if name == "icmpv6" and first is None and last is None:
        return name, -1, -1
    numbers = _number(first), _number(last)
    if name in ("tcp", "udp"):
        return name, *_ports(*numbers)
    return name, *_icmp(*numbers)


def _protocol(value: Any) -> str:
    if value in (None, ""):
        invalid_value(
            "Invalid value 'null' for protocol. VPC security group rules must specify protocols explicitly."
        )
    text = _PROTOCOL_NAMES.get(str(value), str(value).lower())
    if text in (*_WITH_PORTS, "-1"):
        return text
    if not (text.isascii() and text.isdigit() and int(text) <= 255):
        invalid_value(f"Invalid value '{value}' for IP protocol. Unknown protocol.")
    return str(int(text))


def _number(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        invalid_value(f"Invalid value '{value}' for portRange.")


def _require_both(first: int | None, last: int | None, what: str) -> tuple[int, int]:
    if first is None or last is None:
        invalid_value(f"Invalid value 'Must specify both from and to ports with {what}.' for portRange.")
    return first, last


def _ports(first: int | None, last: int | None) -> tuple[int, int]:
    first, last = _require_both(first, last, "TCP/UDP")
    for name, port in (("from", first), ("to", last)):
        if not 0 <= port <= 65535:
            invalid_value(f"TCP/UDP ({name}) port ({port}) out of range")
    if first > last:
        invalid_value(f"Invalid TCP/UDP port range ({first}:{last})")
    return first, last


def _icmp(first: int | None, last: int | None) -> tuple[int, int]:
    first, last = _require_both(first, last, "ICMP")
    for name, number in (("type", first), ("code", last)):
        if not -1 <= number <= 255:
            invalid_value(f"ICMP {name} ({number}) out of range")
    if first == -1 and last != -1:
        invalid_value(f"ICMP code ({last}) requires a type: all types (-1) take all codes (-1)")
    return first, last


def network(key: str, text: Any) -> str:
    """Return a network in canonical form: EC2 clears the host bits."""
    address, _, bits = str(text or "").partition("/")
    try:
        # int(): Python would also accept a netmask, or no prefix.
        return str(_NETWORKS[key]((address, int(bits)), strict=False))
    except ValueError:
        invalid_value(f"CIDR block {text} is malformed")


def _ranges(listed: list[Any]) -> list[dict[str, Any]]:
    found = []
    for one in listed:
        key = "CidrIpv6" if "CidrIpv6" in one else "CidrIp"
        found.append({**one, key: network(key, one.get(key))})
    return found


def _parse(original: Callable[..., Any], self: Any) -> list[dict[str, Any]]:
    action = self._get_action()
    if action.startswith("Update") and not self._get_param("IpPermissions"):
        return list(original(self))  # descriptions of rules that are given by id
    rules = [_normalized(rule) for rule in original(self)]
    if action.startswith("Authorize"):
        _check_new(rules)
        _check_groups(self.ec2_backend, rules)
    return rules


def _normalized(rule: dict[str, Any]) -> dict[str, Any]:
    if rule["security_rule_ids"]:  # given by id, not by protocol, ports and peers
        return rule
    protocol, first, last = normalize(rule["ip_protocol"], rule["from_port"], rule["to_port"])
    return {
        **rule,
        "ip_protocol": protocol,
        "from_port": -1 if first is None else first,  # moto requires one; see _create
        "to_port": -1 if last is None else last,
        "ip_ranges": _ranges(rule["ip_ranges"]),
    }


def _check_new(rules: list[dict[str, Any]]) -> None:
    seen = set()
    for rule in rules:
        sources = [
            *(one.get("CidrIp") or one["CidrIpv6"] for one in rule["ip_ranges"]),
            *(one.get("GroupId") or one.get("GroupName") for one in rule["source_groups"]),
            *(one.get("PrefixListId") for one in rule["prefix_list_ids"]),
        ]
        if not sources:
            client_error(
                "MissingParameter",
                "Missing source specification: include source security group or CIDR information",
            )
        for source in sources:
            key = (rule["ip_protocol"], rule["from_port"], rule["to_port"], source)
            if key in seen:
                invalid_value("The same permission must not appear multiple times")
            seen.add(key)


def _check_groups(backend: Any, rules: list[dict[str, Any]]) -> None:
    """Reject unknown groups: moto would take a name for an id, and store it in the rule."""
    pairs = (pair for rule in rules for pair in rule["source_groups"])
    security_groups.find(backend, (pair["GroupId"] for pair in pairs if pair.get("GroupId")))


def _create(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.ip_protocol not in _WITH_PORTS:
        self.from_port = self.to_port = None


def _authorize(original: Callable[..., Any], self: Any) -> Any:
    """Create all rules of a request or none. moto keeps those before the one that it rejects."""
    name = self._get_param("GroupName") or self._get_param("GroupId")
    group = self.ec2_backend.get_security_group_by_name_or_id(name)
    before = (list(group.ingress_rules), list(group.egress_rules)) if group else None
    try:
        return original(self)
    except Exception:
        if before:
            group.ingress_rules, group.egress_rules = before
        raise
