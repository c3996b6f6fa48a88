"""What the lab's firewall has to enforce: the nodes on the network and the rules of their security groups. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """A node on the network. A node with several groups may do what any of them allows."""

    private: str
    public: str | None
    groups: tuple[str, ...]
    vpc: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole policy; compared and replaced as a whole. `ingress` and `egress` are keyed by group id."""

    members: tuple[Member, ...] = ()
    ingress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    egress: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
