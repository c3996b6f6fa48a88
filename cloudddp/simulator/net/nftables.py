"""Renders a policy and faults as nftables rules: pure functions that return text for `nft -f`, and `nft`,
which runs it.

EC2's rules are stateful, closed by default, and only allow. So is this table: connections are tracked, each
node's groups are a chain, and what no chain accepts is dropped. Routes apply to every packet, established or
not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping

from cloudddp.simulator.net.policy import LAPTOP, S3, S3_PORT, Faults, Member, Policy, Rule

METADATA = "169.254.169.254"  # the instance metadata service
LINK_TABLE, LINK_CHAIN = "cloudddp_link", "link"
LINK_MARK = 0x6C696E6B  # of packets that have passed the link

_SLOW_SSH = "limit rate over 4 kbytes/second burst 2 kbytes drop"
_ESTABLISHED = "ct state established,related accept"


def ruleset(policy: Policy, faults: Faults) -> str:
    """Return the whole table, which replaces the one before."""
    kinds = sorted({_kind(member) for member in policy.members})
    numbers = {kind: number for number, kind in enumerate(kinds)}
    nodes = [(member.private, numbers[_kind(member)]) for member in policy.members]
    public = [(member.public, member.private) for member in policy.members if member.public]
    parts = [
        "table inet cloudddp",
        "delete table inet cloudddp",
        "table inet cloudddp {",
        *(_set(f"g_{group}", addresses) for group, addresses in _groups(policy).items()),
        *(_set(_vpc_set(vpc), addresses) for vpc, addresses in _vpcs(policy).items()),
        _set("privates", [private for private, _ in nodes]),
        _set("outgoing", [member.private for member in policy.members if member.source]),
        _set("answering", [m.private for m in policy.members if m.public and m.answers_public]),
        _set("answering_laptop", [m.private for m in policy.members if m.public and m.answers_laptop]),
        *_group_chains(policy, kinds),
        _map("ingress", "ipv4_addr : verdict", [(private, f"jump in_{n}") for private, n in nodes]),
        _map("egress", "ipv4_addr : verdict", [(private, f"jump out_{n}") for private, n in nodes]),
        _map("to_private", "ipv4_addr : ipv4_addr", public),
        _map(
            "to_public", "ipv4_addr : ipv4_addr", [(m.private, m.source) for m in policy.members if m.source]
        ),
        _chain("faults", _fault_rules(faults)),
        *_filter_chains(policy.vpn),
        *_nat_chains(policy.vpn),
        "}",
        "",
    ]
    return "\n".join(parts)


def link_ruleset(*, present: bool = True) -> str:
    """Return the table that sends packets between laptop and nodes to the chain LINK_CHAIN, or that removes
    it.

    Of packets of nodes, those for the laptop only: metadata and S3 are not there.
    """
    remove = f"table ip {LINK_TABLE}\ndelete table ip {LINK_TABLE}\n"
    if not present:
        return remove
    parts = [
        f"table ip {LINK_TABLE} {{",
        _chain(LINK_CHAIN, []),
        _chain(
            "leaving",
            [
                # Before connections are tracked: the packet comes by a second time, when the link lets it go.
                "type filter hook output priority raw;",
                f'oifname != "lo" ip saddr {LAPTOP} meta mark != {LINK_MARK} jump {LINK_CHAIN}',
            ],
        ),
        _chain(
            "arriving",
            [
                "type filter hook input priority filter + 10;",
                f'iifname != "lo" ip daddr {LAPTOP} jump {LINK_CHAIN}',
            ],
        ),
        "}",
        "",
    ]
    return remove + "\n".join(parts)


def nft(text: str) -> None:
    """Apply a text as a whole. Raises OSError, with nothing changed, if it is rejected."""
    done = subprocess.run(["nft", "-f", "-"], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"nft rejected the firewall rules: {done.stderr.strip()}")


def _kind(member: Member) -> tuple[str, tuple[str, ...]]:
    """Members of the same VPC and groups share a chain."""
    return member.vpc, member.groups


def _group_chains(policy: Policy, kinds: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return a chain for traffic into, and one for traffic out of, each kind of member."""
    ingress = [
        _chain(f"in_{n}", _accepts(policy.ingress, groups, "ip saddr")) for n, (_, groups) in enumerate(kinds)
    ]
    egress = [
        # Egress rules apply to the original destination: on EC2 a public address is translated outside the
        # VPC.
        _chain(f"out_{n}", [_drop_other_vpcs(vpc), *_accepts(policy.egress, groups, "ct original ip daddr")])
        for n, (vpc, groups) in enumerate(kinds)
    ]
    return ingress + egress


def _filter_chains(vpn: Mapping[str, str]) -> list[str]:
    return [
        _chain(
            "between_nodes",
            [
                "type filter hook forward priority filter; policy drop;",
                "jump faults",
                *_drop_without_route(),
                _ESTABLISHED,
                "ip saddr vmap @egress",
                "drop",
            ],
        ),
        _chain(
            "from_laptop",
            [
                "type filter hook output priority filter; policy drop;",
                'oifname "lo" accept',
                f"ip saddr {METADATA} accept",  # metadata is subject to no group and no network fault
                "jump faults",
                "ct status dnat ip daddr != @answering_laptop drop",
                _ESTABLISHED,
                "ct status dnat accept",  # from outside, a VPC is reached by public addresses, or by a VPN
                *(f"ip daddr @{_vpc_set(vpc)} accept" for vpc in sorted(vpn)),
            ],
        ),
        _chain(
            "to_node",
            [
                # After source NAT: a node that connects to a public address arrives from its own public
                # address, and does not count as a member of any group.
                "type filter hook postrouting priority 150; policy drop;",
                'oifname "lo" accept',
                f"ip saddr {METADATA} accept",
                _ESTABLISHED,
                "ip daddr vmap @ingress",
            ],
        ),
        _chain(
            "to_laptop",
            [
                "type filter hook input priority filter; policy drop;",
                'iifname "lo" accept',
                f"ip daddr {METADATA} tcp dport 80 accept",
                "jump faults",
                f"ip daddr {S3} ip saddr != @outgoing drop",
                _ESTABLISHED,
                f"ip daddr {S3} tcp dport {S3_PORT} ip saddr vmap @egress",
            ],
        ),
    ]


def _drop_without_route() -> Iterator[str]:
    """Yield the rules for packets between two nodes that use a public address: both sides need a route for
    their own."""
    for direction, caller, called in (("original", "saddr", "daddr"), ("reply", "daddr", "saddr")):
        for side, known in ((caller, "outgoing"), (called, "answering")):
            yield f"ct status dnat ct direction {direction} ip {side} != @{known} drop"


def _nat_chains(vpn: Mapping[str, str]) -> list[str]:
    """Public addresses are 1:1 NAT; a NAT gateway is shared. Nodes see the laptop under its address in the
    VPN."""
    to_private = "dnat ip to ip daddr map @to_private"
    to_public = "snat ip to ip saddr map @to_public"
    return [
        _chain("dnat_laptop", ["type nat hook output priority -100;", to_private]),
        _chain("dnat_nodes", ["type nat hook prerouting priority -100;", to_private]),
        _chain(
            "snat_nodes",
            [
                "type nat hook postrouting priority 100;",
                f"ip daddr @privates ct status dnat ip saddr @privates {to_public}",
                *(
                    f"ip saddr {LAPTOP} ct original ip daddr @{_vpc_set(vpc)} snat ip to {address}"
                    for vpc, address in sorted(vpn.items())
                ),
            ],
        ),
    ]


def _groups(policy: Policy) -> dict[str, list[str]]:
    """Return the members' addresses of every group that a rule or a member names."""
    found: dict[str, list[str]] = {}
    for rules in (*policy.ingress.values(), *policy.egress.values()):
        for rule in rules:
            for group in rule.groups:
                found.setdefault(group, [])
    for member in policy.members:
        for group in member.groups:
            found.setdefault(group, []).append(member.private)
    return {group.replace("-", "_"): addresses for group, addresses in sorted(found.items())}


def _vpcs(policy: Policy) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for member in policy.members:
        found.setdefault(member.vpc, []).append(member.private)
    for vpc in policy.vpn:
        found.setdefault(vpc, [])
    return dict(sorted(found.items()))


def _vpc_set(vpc: str) -> str:
    return f"v_{vpc.replace('-', '_')}"


def _drop_other_vpcs(vpc: str) -> str:
    return f"ct original ip daddr @privates ct original ip daddr != @{_vpc_set(vpc)} drop"


def _accepts(rules: Mapping[str, tuple[Rule, ...]], groups: Iterable[str], peer: str) -> list[str]:
    """Return what the groups allow; `peer` is nft's expression for the address of the other side."""
    lines: list[str] = []
    for group in groups:
        for rule in rules.get(group, ()):
            match = _match(rule)
            lines += [f"{_from_network(peer, network)}{match}accept" for network in rule.networks]
            lines += [f"{peer} @g_{other.replace('-', '_')} {match}accept" for other in rule.groups]
    return list(dict.fromkeys(lines))


def _from_network(peer: str, network: str) -> str:
    return "" if network == "0.0.0.0/0" else f"{peer} {network} "


def _match(rule: Rule) -> str:
    """Return nft's expression for protocol and ports; it ends with a space unless it is empty."""
    if rule.protocol == "-1":
        return ""
    if rule.protocol in ("tcp", "udp"):
        first, last = rule.from_port or 0, 65535 if rule.to_port in (None, -1) else rule.to_port
        return f"{rule.protocol} dport {first}-{last} "
    if rule.protocol == "icmp":
        fields = (("type", rule.from_port), ("code", rule.to_port))
        matches = [f"icmp {name} {number} " for name, number in fields if number not in (None, -1)]
        return "".join(matches) or "ip protocol icmp "
    return f"meta l4proto {rule.protocol} "


def _fault_rules(faults: Faults) -> list[str]:
    lines = []
    for address in sorted(faults.cut):
        lines += [f"ip saddr {address} drop", f"ip daddr {address} drop"]
    for pair in sorted(map(sorted, faults.cut_pairs)):
        lines += [f"ip saddr {a} ip daddr {b} drop" for a, b in (pair, pair[::-1])]
    lines += [f"ip saddr {sender} ip daddr {receiver} drop" for sender, receiver in sorted(faults.cut_from)]
    for addresses, verdict in ((faults.drop_ssh, "drop"), (faults.slow_ssh, _SLOW_SSH)):
        for address in sorted(addresses):
            lines += [
                f"ip daddr {address} tcp dport 22 {verdict}",
                f"ip saddr {address} tcp sport 22 {verdict}",
            ]
    return lines


def _chain(name: str, lines: Iterable[str]) -> str:
    return f"chain {name} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"


def _set(name: str, addresses: Iterable[str]) -> str:
    listed = ", ".join(dict.fromkeys(addresses))
    return f"set {name} {{\n  type ipv4_addr\n" + (f"  elements = {{ {listed} }}\n" if listed else "") + "}"


def _map(name: str, kind: str, pairs: Iterable[tuple[str, str]]) -> str:
    listed = ", ".join(f"{key} : {value}" for key, value in pairs)
    return f"map {name} {{\n  type {kind}\n" + (f"  elements = {{ {listed} }}\n" if listed else "") + "}"
