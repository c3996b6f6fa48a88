"""The network interfaces of a node: which ones an instance type gets, and what RunInstances is told of them.
Pure.

With EFA the layout follows EC2's description of the type (DescribeInstanceTypes, NetworkInfo), not a table.
Source: EC2 User Guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards". Its
section on P5 has two layouts; this is the one that saves addresses: an `efa-only` interface has none, so a
p5.48xlarge takes one address of the subnet and not 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cloudddp.aws.instance_types import NetworkCard, TypeInfo
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface: its network card, its device index on that card, and EC2's interface type."""

    card: int = 0
    device: int = 0
    kind: str = "interface"  # or efa (with an IP address), efa-only (without)

    @property
    def efa(self) -> bool:
        return self.kind != "interface"


ORDINARY = (Interface(),)


def check_settings(spec: ClusterSpec) -> None:
    """Raise UsageError for settings that exclude each other. Calls nothing."""
    if spec.require_efa and not spec.efa:
        raise UsageError(
            "EFA is required and switched off",
            hint="omit --no-efa (efa = false in cloudddp.toml), or --require-efa",
        )


def choose(spec: ClusterSpec, info: TypeInfo) -> tuple[Interface, ...]:
    """Return the interfaces of each node, the primary one first.

    EFA is for traffic between nodes, so a single node gets it only if it is required. Raises UsageError if
    EFA is required and the type has none.
    """
    if spec.require_efa and not info.max_efa:
        raise UsageError(
            f"{spec.instance_type} has no EFA",
            hint="choose a type with EFA, such as g5.8xlarge, p4d.24xlarge or p5.48xlarge, or omit "
            "--require-efa",
        )
    if not spec.efa or not info.max_efa or (spec.nodes == 1 and not spec.require_efa):
        return ORDINARY
    return _with_efa(info)


def _with_efa(info: TypeInfo) -> tuple[Interface, ...]:
    cards = sorted(info.network_cards, key=lambda card: card.index)
    if info.max_efa == 1 and "efa" in cards[0].kinds:
        return (Interface(kind="efa"),)  # one interface, so that EC2 can assign a public address
    extra = [Interface(device=1, kind="efa-only")] if _takes_second(cards[0]) else []
    extra += [Interface(card.index, 0, "efa-only") for card in cards[1:] if "efa-only" in card.kinds]
    # The primary interface has no EFA here. EC2 refuses more EFA interfaces than the type's maximum.
    return (Interface(), *extra[: info.max_efa])


def _takes_second(card: NetworkCard) -> bool:
    """Return whether card 0 takes an `efa-only` interface beside the primary one: not on p6-b300."""
    return "efa-only" in card.kinds and card.interfaces > 1


def efa_devices(interfaces: Sequence[Interface]) -> int:
    """Return how many EFA devices a node has."""
    return sum(one.efa for one in interfaces)


def needs_elastic_ip(interfaces: Sequence[Interface], *, public: bool) -> bool:
    """Return whether a node that needs a public address has to get an Elastic IP.

    EC2 assigns a public address at launch to an instance with a single interface only (API reference,
    InstanceNetworkInterfaceSpecification.AssociatePublicIpAddress).
    """
    return public and len(interfaces) > 1


def specification(
    interfaces: Sequence[Interface],
    *,
    subnet_id: str,
    group: object,
    public: bool,
    ip_settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the parameter NetworkInterfaces of RunInstances.

    `group`: the security group, or a Ref to it. `ip_settings`: more parameters of interfaces that have an IP
    address.
    """
    entries: list[dict[str, Any]] = []
    for one in interfaces:
        entry: dict[str, Any] = {
            "DeviceIndex": one.device,
            "SubnetId": subnet_id,
            "Groups": [group],
            "DeleteOnTermination": True,
        }
        if one.efa or len(interfaces) > 1:
            entry["InterfaceType"] = one.kind
        if len(interfaces) > 1:
            entry["NetworkCardIndex"] = one.card
        else:
            entry["AssociatePublicIpAddress"] = public
        entries.append({**entry, **(ip_settings if one.kind != "efa-only" else {})})
    return entries
