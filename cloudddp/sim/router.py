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
_NO_WAY_OUT = 7  # the number of a routing table
_ROUTER_MAC = "02:00:5e:00:00:01"
_SSH_CRAWL = "limit rate over 4 kbytes/second burst 2 kbytes drop"  # what a very bad line leaves of SSH


@dataclass(frozen=True, slots=True)
class Rule:
    """What a security group lets through: a protocol ("-1": all), ports, and peers (networks or groups).

    Of ICMP, `first` and `last` are the type and the code; -1 and None are all of them.
    """

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
    vpc: str = ""


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

    def concern(self, address: str) -> bool:
        single = address in self.cut | self.no_ssh | self.slow_ssh
        return single or any(address in pair for pair in self.cut_pairs)

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
        """Give the laptop its address and make every other one a place where packets vanish, as on the internet.

        To the nodes, that is. The laptop itself hears at once that an address has no way: its programs would
        otherwise wait out every look at the internet.
        """
        settings = Path("/proc/sys/net/ipv4")
        (settings / "ip_forward").write_text("1")
        for those in ("all", "default"):
            # EC2's source check: what a cable brings must come from the one address that is routed to that cable.
            (settings / "conf" / those / "rp_filter").write_text("1")
        _ip(
            "link set lo up",
            f"addr add {LAPTOP}/32 dev lo",
            f"addr add {METADATA}/32 dev lo",
            f"link add {_VOID} type veth peer name void1",
            f"link set {_VOID} arp off up",
            "link set void1 up",
            f"route add {PUBLIC} dev {_VOID} src {LAPTOP}",
            f"route add default dev {_VOID} table {_NO_WAY_OUT}",
            f"rule add pref 40000 not iif lo lookup {_NO_WAY_OUT}",  # after the main table; lo: sent from here
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

    def unplug(self, private: str, *, for_good: bool = False) -> None:
        """The cable goes; what is sent there from now on vanishes. What is broken on request stays broken for who
        is plugged in there next, unless the node leaves `for_good`: then that is somebody else.
        """
        with self._lock:
            cable = self._cables.pop(private, None)
            healed = for_good and self.faults.concern(private)
            if healed:
                self.faults.forget(private)
        if cable is not None:
            # Not merely deleted: where there is no route, the network would tell every peer so at once.
            void = f"route replace {private}/32 dev {_VOID} src {LAPTOP}"
            text = f"{void}\nlink del {cable}\n"
            subprocess.run(["ip", "-batch", "-"], input=text.encode(), capture_output=True, check=False)
        if healed:
            self.apply()

    def apply(self, policy: Policy | None = None) -> None:
        """Replace the firewall by one for `policy` (or for the same one, after a change of `faults`).

        Raises OSError, and leaves the firewall as it is, where the policy cannot be put into rules.
        """
        with self._lock:
            wanted = policy or self._policy
            text = ruleset(wanted, self.faults)
            done = subprocess.run(["nft", "-f", "-"], input=text, text=True, capture_output=True, check=False)
            if done.returncode:
                raise OSError(f"nft refused the lab's rules: {done.stderr.strip()}")
            self._policy = wanted


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
    kinds = sorted({_kind(member) for member in policy.members})
    chains = [
        _chain(f"in_{n}", _lines(policy.ingress, groups, "ip saddr")) for n, (_, groups) in enumerate(kinds)
    ]
    chains += [
        # What was called counts, as on EC2, where a public address stays one until it has left the VPC.
        _chain(f"out_{n}", [_other_vpcs(vpc), *_lines(policy.egress, groups, "ct original ip daddr")])
        for n, (vpc, groups) in enumerate(kinds)
    ]
    numbers = {kind: n for n, kind in enumerate(kinds)}
    nodes = [(member.private, numbers[_kind(member)]) for member in policy.members]
    public = [(member.public, member.private) for member in policy.members if member.public]
    return "\n".join(
        [
            "table inet cloudddp",
            "delete table inet cloudddp",
            "table inet cloudddp {",
            *(_set(f"g_{group}", addresses) for group, addresses in _groups(policy).items()),
            *(_set(_vpc_set(vpc), addresses) for vpc, addresses in _vpcs(policy).items()),
            _set("privates", [ip for ip, _ in nodes]),
            _set("with_public", [private for _, private in public]),
            *chains,
            _map("ingress", "ipv4_addr : verdict", [(ip, f"jump in_{n}") for ip, n in nodes]),
            _map("egress", "ipv4_addr : verdict", [(ip, f"jump out_{n}") for ip, n in nodes]),
            _map("to_private", "ipv4_addr : ipv4_addr", public),
            _map("to_public", "ipv4_addr : ipv4_addr", [(private, ip) for ip, private in public]),
            _chain("faults", _fault_lines(faults)),
            _chain(
                "between",
                [
                    "type filter hook forward priority filter; policy drop;",
                    "jump faults",
                    "ct state established,related accept",
                    "ct status dnat ip saddr != @with_public drop",  # without an address there, no way out
                    "ip saddr vmap @egress",
                    "drop",
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


def _kind(member: Member) -> tuple[str, tuple[str, ...]]:
    """Members of one kind may do the same, and share a chain."""
    return member.vpc, member.groups


def _vpcs(policy: Policy) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for member in policy.members:
        found.setdefault(member.vpc, []).append(member.private)
    return dict(sorted(found.items()))


def _vpc_set(vpc: str) -> str:
    return f"v_{vpc.replace('-', '_')}"


def _other_vpcs(vpc: str) -> str:
    return f"ct original ip daddr @privates ct original ip daddr != @{_vpc_set(vpc)} drop"


def _lines(rules: Mapping[str, tuple[Rule, ...]], groups: Iterable[str], peer: str) -> list[str]:
    """What the groups let through; `peer` is nft's expression for the other side's address."""
    lines: list[str] = []
    for group in groups:
        for rule in rules.get(group, ()):
            what = _match(rule)
            lines += [f"{_among(peer, network)}{what}accept" for network in rule.networks]
            lines += [f"{peer} @g_{other.replace('-', '_')} {what}accept" for other in rule.groups]
    return list(dict.fromkeys(lines))


def _among(peer: str, network: str) -> str:
    return "" if network == "0.0.0.0/0" else f"{peer} {network} "


def _match(rule: Rule) -> str:
    """The protocol and ports of a rule, in nft's words; ends with a space unless it is empty."""
    if rule.protocol == "-1":
        return ""
    if rule.protocol in ("tcp", "udp"):
        first, last = rule.first or 0, 65535 if rule.last in (None, -1) else rule.last
        return f"{rule.protocol} dport {first}-{last} "
    if rule.protocol == "icmp":
        kinds = [f"icmp {name} {number} " for name, number in (("type", rule.first), ("code", rule.last))
                 if number not in (None, -1)]  # fmt: skip
        return "".join(kinds) or "ip protocol icmp "
    return f"meta l4proto {rule.protocol} "


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
