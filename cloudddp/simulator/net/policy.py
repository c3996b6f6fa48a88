"""What the lab's firewall has to enforce: nodes and the rules of their security groups, and injected faults.
Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LAPTOP = "203.0.113.10"  # TEST-NET-3, reserved for documentation by RFC 5737
S3 = "192.0.2.80"  # TEST-NET-1: the address of Amazon S3, as nodes reach it
S3_PORT = 443  # what rules of security groups allow; the simulator's S3 is not encrypted
PUBLIC = "198.51.100.0/24"  # TEST-NET-2: the public addresses of nodes and NAT gateways


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a security group: a protocol ("-1": all), ports, and peers (networks or groups).

    For ICMP, `from_port` and `to_port` are type and code; -1 and None mean all.
    """

    protocol: str
    from_port: int | None = None
    to_port: int | None = None
    networks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A node on the network. A node with several groups may do what any of them allows.

    `public` answers other public addresses, or the laptop, only if the route to them is an internet gateway.
    `source` is the address from which the node reaches public addresses, its own or a NAT gateway's; None if
    it does not.
    """

    private: str
    public: str | None
    groups: tuple[str, ...]
    vpc: str = ""
    source: str | None = None
    answers_public: bool = False
    answers_laptop: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole policy; compared and replaced as a whole. `ingress` and `egress` are keyed by group id.

    `vpn` are the VPCs whose private addresses the laptop reaches, each with the address that nodes see it
    under.
    """

    members: tuple[Member, ...] = ()
    ingress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    egress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    vpn: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Faults:
    """The injected faults in effect, by the private addresses of the nodes. Changes take effect with the next
    Router.apply.
    """

    cut: set[str] = field(default_factory=set)
    cut_pairs: set[frozenset[str]] = field(default_factory=set)
    cut_from: set[tuple[str, str]] = field(default_factory=set)  # sender, receiver
    drop_ssh: set[str] = field(default_factory=set)
    slow_ssh: set[str] = field(default_factory=set)

    def affects(self, address: str) -> bool:
        single = address in self.cut | self.drop_ssh | self.slow_ssh
        return single or any(address in pair for pair in (*self.cut_pairs, *self.cut_from))

    def heal(self, address: str) -> None:
        """Remove every fault of a node."""
        for addresses in (self.cut, self.drop_ssh, self.slow_ssh):
            addresses.discard(address)
        self.cut_pairs = {pair for pair in self.cut_pairs if address not in pair}
        self.cut_from = {pair for pair in self.cut_from if address not in pair}
