"""The network between the simulated hosts: a cable a node, routes, public addresses, and security groups.

One network namespace is the laptop and everything between the nodes, with no way out of it. Each node hangs on a
cable of its own and reaches the others through here only, so one nftables table sees every packet. Knows nothing
of moto or of how nodes are made; needs `ip` and `nft`, and root over the namespace.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LAPTOP = "203.0.113.10"  # TEST-NET-3, RFC 5737: addresses that are nobody's
PUBLIC = "198.51.100.0/24"  # TEST-NET-2
METADATA = "169.254.169.254"  # answered here, for every node, by who asks
MTU = 9001  # as inside a VPC
_VOID = "void0"
_ROUTER_MAC = "02:00:5e:00:00:01"
_SSH_CRAWL = "limit rate over 4 kbytes/second burst 2 kbytes drop"  # what a very bad line leaves of SSH


@dataclass(frozen=True, slots=True)
class Rule:
    """What a security group lets through: a protocol ("-1": all), ports, and peers (networks or groups)."""

    protocol: str
    first: int | None = None
    last: int | None = None
    networks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A node on the network. A node with several groups may do what any of them allows."""

    private: str
    public: str | None
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """All that the firewall has to know; compared as a whole, and replaced as a whole."""

    members: tuple[Member, ...] = ()
    ingress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    egress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Faults:
    """What is broken on request, by private address."""

    cut: set[str] = field(default_factory=set)
    cut_pairs: set[frozenset[str]] = field(default_factory=set)
    no_ssh: set[str] = field(default_factory=set)
    slow_ssh: set[str] = field(default_factory=set)

    def forget(self, address: str) -> None:
        for one in (self.cut, self.no_ssh, self.slow_ssh):
            one.discard(address)
        self.cut_pairs = {pair for pair in self.cut_pairs if address not in pair}


class Router:
    """The network of one lab. `set_up` in its namespace first; everything may be called from any thread of it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._policy = Policy()
        self._lock = threading.Lock()
        self._numbers = iter(range(1, 1 << 20))
        self._cables: dict[str, str] = {}  # private address -> the lab's end

    def set_up(self) -> None:
        """Give the laptop its address and make every other one a place where packets vanish, as on the internet."""
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _ip(
            "link set lo up",
            f"addr add {LAPTOP}/32 dev lo",
            f"addr add {METADATA}/32 dev lo",
            f"link add {_VOID} type veth peer name void1",
            f"link set {_VOID} arp off up",
            "link set void1 up",
            f"route add {PUBLIC} dev {_VOID} src {LAPTOP}",
        )
        self.apply(self._policy)

    def plug(self, pid: int, *, interface: str, private: str, mac: str) -> None:
        """Lay a cable to the network namespace of `pid`, where it comes out as `interface`. Raises OSError."""
        with self._lock:
            cable = f"n{next(self._numbers)}"
            self._cables[private] = cable
        _ip(
            f"link add {cable} address {_ROUTER_MAC} mtu {MTU} type veth "
            f"peer name {interface} address {mac} mtu {MTU} netns {pid}",
            f"link set {cable} up",
            f"neigh replace {private} lladdr {mac} dev {cable} nud permanent",
            f"route replace {private}/32 dev {cable} src {LAPTOP}",
        )

    def unplug(self, private: str) -> None:
        """The cable goes with the node's namespace; what is left of it here must not meet its successor."""
        with self._lock:
            cable = self._cables.pop(private, None)
            self.faults.forget(private)
        if cable is not None:
            subprocess.run(["ip", "link", "del", cable], capture_output=True, check=False)

    def apply(self, policy: Policy | None = None) -> None:
        """Replace the firewall by one for `policy` (or for the same one, after a change of `faults`)."""
        with self._lock:
            self._policy = policy or self._policy
            text = ruleset(self._policy, self.faults)
            done = subprocess.run(["nft", "-f", "-"], input=text, text=True, capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"nft refused the lab's rules: {done.stderr.strip()}")


def node_commands(*, interface: str, private: str, prefix_length: int, gateway: str) -> list[str]:
    """What `ip` has to be told inside a node: its address, and that everything is behind the gateway."""
    return [
        "link set lo up",
        f"addr add {private}/{prefix_length} dev {interface} noprefixroute",
        f"link set {interface} mtu {MTU} up",
        f"neigh replace {gateway} lladdr {_ROUTER_MAC} dev {interface} nud permanent",
        f"route add {gateway} dev {interface} scope link",
        f"route add default via {gateway} dev {interface} src {private}",
    ]


def ruleset(policy: Policy, faults: Faults) -> str:
    """The whole nftables table, as text for `nft -f`: EC2's rules are stateful, default closed, and only allow."""
    sets = sorted({member.groups for member in policy.members})
    chains = [
        _chain(f"in_{n}", _lines(policy.ingress, groups, "saddr", "accept")) for n, groups in enumerate(sets)
    ]
    chains += [
        _chain(f"out_{n}", [*_lines(policy.egress, groups, "daddr", "return"), "drop"])
        for n, groups in enumerate(sets)
    ]
    numbers = {groups: n for n, groups in enumerate(sets)}
    nodes = [(member.private, numbers[member.groups]) for member in policy.members]
    public = [(member.public, member.private) for member in policy.members if member.public]
    return "\n".join(
        [
            "table inet cloudddp",
            "delete table inet cloudddp",
            "table inet cloudddp {",
            *(_set(f"g_{group}", addresses) for group, addresses in _groups(policy).items()),
            *chains,
            _map("ingress", "ipv4_addr : verdict", [(ip, f"jump in_{n}") for ip, n in nodes]),
            _map("egress", "ipv4_addr : verdict", [(ip, f"jump out_{n}") for ip, n in nodes]),
            _map("to_private", "ipv4_addr : ipv4_addr", public),
            _map("to_public", "ipv4_addr : ipv4_addr", [(private, ip) for ip, private in public]),
            _set("privates", [ip for ip, _ in nodes]),
            _chain("faults", _fault_lines(faults)),
            _chain(
                "between",
                [
                    "type filter hook forward priority filter; policy drop;",
                    "jump faults",
                    "ct state established,related accept",
                    "ip saddr vmap @egress",
                    "accept",
                ],
            ),
            _chain(
                "from_laptop",
                [
                    "type filter hook output priority filter; policy drop;",
                    'oifname "lo" accept',
                    f"ip saddr {METADATA} accept",  # no group and no fault of the network cuts this off
                    "jump faults",
                    "ct state established,related accept",
                    "ct status dnat accept",  # a private address is no way into a VPC
                ],
            ),
            _chain(
                "to_node",
                [
                    # After the sources have become public ones: a node that calls a public address comes from its
                    # own, and is no member of any group then.
                    "type filter hook postrouting priority 150; policy drop;",
                    'oifname "lo" accept',
                    f"ip saddr {METADATA} accept",
                    "ct state established,related accept",
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
                    "ct state established,related accept",
                ],
            ),
            _chain(
                "public_out", ["type nat hook output priority -100;", "dnat ip to ip daddr map @to_private"]
            ),
            _chain(
                "public_in",
                ["type nat hook prerouting priority -100;", "dnat ip to ip daddr map @to_private"],
            ),
            _chain(
                "public_from",
                [
                    "type nat hook postrouting priority 100;",
                    "ip daddr @privates ct status dnat ip saddr @privates snat ip to ip saddr map @to_public",
                ],
            ),
            "}",
            "",
        ]
    )


def _groups(policy: Policy) -> dict[str, list[str]]:
    """Every group that a rule or a member names, with its members' addresses."""
    found: dict[str, list[str]] = {}
    for rules in (*policy.ingress.values(), *policy.egress.values()):
        for rule in rules:
            for group in rule.groups:
                found.setdefault(group, [])
    for member in policy.members:
        for group in member.groups:
            found.setdefault(group, []).append(member.private)
    return {group.replace("-", "_"): addresses for group, addresses in sorted(found.items())}


def _lines(
    rules: Mapping[str, tuple[Rule, ...]], groups: Iterable[str], side: str, verdict: str
) -> list[str]:
    lines: list[str] = []
    for group in groups:
        for rule in rules.get(group, ()):
            what = _match(rule)
            lines += [
                f"ip {side} {network} {what}{verdict}".replace("ip saddr 0.0.0.0/0 ", "").replace(
                    "ip daddr 0.0.0.0/0 ", ""
                )
                for network in rule.networks
            ]
            lines += [f"ip {side} @g_{peer.replace('-', '_')} {what}{verdict}" for peer in rule.groups]
    return list(dict.fromkeys(lines))


def _match(rule: Rule) -> str:
    """The protocol and ports of a rule, in nft's words; ends with a space unless it is empty."""
    protocol = {"6": "tcp", "17": "udp", "1": "icmp"}.get(rule.protocol, rule.protocol)
    if protocol == "-1":
        return ""
    if protocol in ("tcp", "udp"):
        first, last = rule.first or 0, 65535 if rule.last in (None, -1) else rule.last
        return f"{protocol} dport {first}-{last} "
    if protocol == "icmp":
        return "ip protocol icmp "
    return f"meta l4proto {protocol} "


def _fault_lines(faults: Faults) -> list[str]:
    lines = []
    for address in sorted(faults.cut):
        lines += [f"ip saddr {address} drop", f"ip daddr {address} drop"]
    for pair in sorted(map(sorted, faults.cut_pairs)):
        lines += [f"ip saddr {a} ip daddr {b} drop" for a, b in (pair, pair[::-1])]
    for addresses, verdict in ((faults.no_ssh, "drop"), (faults.slow_ssh, _SSH_CRAWL)):
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


def _ip(*commands: str) -> None:
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")
