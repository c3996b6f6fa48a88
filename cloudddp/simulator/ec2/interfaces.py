"""Network interfaces of instances: several cards, EFA, and the limits of the instance type.

moto keeps one interface per device index, all of type `interface` on card 0. Here an instance's interfaces
are keyed by card and index, have the requested type, and are deleted with the instance. Addresses: see
ip_addresses.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2 import catalog, ip_addresses
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import (
    backend_data,
    client_error,
    invalid_combination,
    invalid_value,
    override,
    wrap,
)

_KINDS = ("interface", "efa", "efa-only")
_TRACKING = {  # ConnectionTrackingSpecification: the range of each timeout in seconds, of EC2's model
    "TcpEstablishedTimeout": (60, 432_000),
    "UdpStreamTimeout": (60, 180),
    "UdpTimeout": (30, 60),
}


def install() -> None:
    """Replace moto's creation and attachment of an instance's interfaces."""
    from moto.ec2.models.elastic_network_interfaces import Attachment
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.elastic_network_interfaces import ElasticNetworkInterfaces

    wrap(Instance, "prep_nics", lambda _original: _prepare)
    override(Instance, "attach_eni", _attach)
    wrap(Instance, "network_interfaces", lambda _original: property(visible))
    override(Attachment, "__init__", _set_card_index)
    override(ElasticNetworkInterfaces, "create_network_interface", _create_interface)
    override(ElasticNetworkInterfaces, "delete_network_interface", _delete_interface)


def kind(nic: dict[str, Any]) -> str:
    """Return the interface type that a request asks for."""
    return str(nic.get("InterfaceType") or "interface")


def position(nic: dict[str, Any]) -> tuple[int, int]:
    """Return network card and device index of a requested interface."""
    return int(nic.get("NetworkCardIndex") or 0), int(nic.get("DeviceIndex") or 0)


def visible(instance: Any) -> list[Any]:
    """Return the instance's interfaces, the primary one first; none once it is terminated, as on AWS."""
    return [] if instance.state == "terminated" else list(instance.nics.values())


def check(instance_type: str, nics: list[dict[str, Any]], *, count: int, groups: bool) -> None:
    """Fail the request for interfaces that the type does not support. `groups`: whether it names groups as
    well."""
    if not nics:
        return
    if groups:
        invalid_combination(
            "Network interfaces and an instance-level security groups may not be specified on the same "
            "request"
        )
    _check_positions(nics)
    for nic in nics:
        _check_tracking(nic)
    if len(nics) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in nics):
        invalid_combination(
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces."
        )
    if count > 1 and any(nic.get("NetworkInterfaceId") for nic in nics):
        invalid_combination("A network interface may not be specified when launching multiple instances.")
    if network := catalog.network(instance_type):
        _check_type(instance_type, nics, network)


def _check_positions(nics: list[dict[str, Any]]) -> None:
    if any(nic.get("DeviceIndex") is None for nic in nics):
        invalid_value("Each network interface requires a device index.")
    positions = [position(nic) for nic in nics]
    if len(set(positions)) < len(positions):
        invalid_value("Each network interface requires a unique device index.")
    if (0, 0) not in positions:
        invalid_value("A network interface with device index 0 on network card 0 is required.")
    for nic in nics:
        if kind(nic) not in _KINDS:
            invalid_value(f"Value ({kind(nic)}) for parameter interfaceType is invalid.")
        if kind(nic) == "efa-only" and position(nic) == (0, 0):
            invalid_combination("The primary network interface cannot be of type efa-only.")
        if kind(nic) == "efa-only" and (nic.get("PrivateIpAddress") or nic.get("AssociatePublicIpAddress")):
            invalid_combination("An efa-only network interface cannot have IP addresses.")


def _check_tracking(nic: dict[str, Any]) -> None:
    for name, value in (nic.get("ConnectionTrackingSpecification") or {}).items():
        least, most = _TRACKING[name]
        if not least <= int(value) <= most:
            invalid_value(
                f"Value ({value}) for parameter {name} is invalid. Expected a number from {least} to {most}."
            )


def _check_type(instance_type: str, nics: list[dict[str, Any]], network: dict[str, Any]) -> None:
    cards = {int(card["NetworkCardIndex"]): card for card in network.get("NetworkCards", [])}
    for card, _ in map(position, nics):
        if card not in cards:
            invalid_value(
                f"Network card index {card} exceeds the limit for {instance_type}, "
                f"which has {len(cards)} network card(s)."
            )
    _check_efa(instance_type, nics, network, cards)
    if len(nics) > network["MaximumNetworkInterfaces"]:
        client_error(
            "AttachmentLimitExceeded", f"Interface count {len(nics)} exceeds the limit for {instance_type}"
        )
    for card, count in Counter(card for card, _ in map(position, nics)).items():
        if count > cards[card]["MaximumNetworkInterfaces"]:
            client_error(
                "AttachmentLimitExceeded",
                f"Interface count {count} exceeds the limit of {cards[card]['MaximumNetworkInterfaces']} "
                f"for {instance_type} on network card {card}",
            )


def _check_efa(
    instance_type: str, nics: list[dict[str, Any]], network: dict[str, Any], cards: dict[int, dict[str, Any]]
) -> None:
    efas = [nic for nic in nics if kind(nic) != "interface"]
    if efas and not network.get("EfaSupported"):
        client_error("UnsupportedOperation", f"EFA interfaces are not supported on {instance_type}")
    for nic in efas:
        card, _ = position(nic)
        if kind(nic) not in cards[card].get("InterfaceTypes", _KINDS):
            client_error(
                "UnsupportedOperation",
                f"Interfaces of type {kind(nic)} are not supported on network card {card} of {instance_type}",
            )
    if len(efas) > network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0):
        client_error(
            "AttachmentLimitExceeded",
            f"EFA interface count {len(efas)} exceeds allowed limit for {instance_type}.",
        )


def _prepare(
    instance: Any,
    nic_spec: list[dict[str, Any]],
    private_ip: str | None = None,
    associate_public_ip: bool | None = None,
    security_groups: list[Any] | None = None,
    ipv6_address_count: int | None = None,
) -> None:
    """Create a new instance's interfaces, the primary one first."""
    instance.nics = {}
    nics = sorted(nic_spec or [{"DeviceIndex": 0}], key=position)
    primary = nics[0]
    if len(nics) > 1:
        associate_public_ip = False
    elif primary.get("AssociatePublicIpAddress") is not None:
        associate_public_ip = bool(primary["AssociatePublicIpAddress"])
    for nic in nics:
        interface = _existing(instance, nic) or _create(
            instance,
            nic,
            private_ip=_private_ip(nic) or (private_ip if nic is primary else None),
            public=bool(associate_public_ip) and nic is primary,
            groups=[*(nic.get("Groups") or []), *(group.id for group in security_groups or [])],
            ipv6_address_count=ipv6_address_count,
        )
        card, index = position(nic)
        interface.network_card_index = card
        if tracking := nic.get("ConnectionTrackingSpecification"):
            interface.connection_tracking_configuration = {
                name: int(value) for name, value in tracking.items()
            }
        instance.attach_eni(interface, index)
    if not instance.security_groups:
        instance.security_groups = list(instance.nics[0]._group_set)


def _private_ip(nic: dict[str, Any]) -> str | None:
    primary = [a["PrivateIpAddress"] for a in nic.get("PrivateIpAddresses") or [] if a.get("Primary")]
    return nic.get("PrivateIpAddress") or (primary[0] if primary else None)


def _existing(instance: Any, nic: dict[str, Any]) -> Any:
    if not nic.get("NetworkInterfaceId"):
        return None
    interface = instance.ec2_backend.get_network_interface(nic["NetworkInterfaceId"])
    if interface.instance is not None:
        client_error("InvalidNetworkInterface.InUse", f"Interface: [{interface.id}] in use.")
    interface.public_ip_auto_assign = False
    interface.delete_on_termination = nic.get("DeleteOnTermination") is True
    return interface


def _create(
    instance: Any,
    nic: dict[str, Any],
    *,
    private_ip: str | None,
    public: bool,
    groups: list[str],
    ipv6_address_count: int | None,
) -> Any:
    backend = instance.ec2_backend
    _, index = position(nic)
    default_description = "Primary network interface" if position(nic) == (0, 0) else None
    subnet = backend.get_subnet(nic.get("SubnetId") or instance.subnet_id)
    ip_addresses.check_in_subnet(subnet, private_ip)
    return backend.create_network_interface(
        subnet,
        private_ip,
        device_index=index,
        public_ip_auto_assign=public,
        group_ids=groups,
        # An interface created by RunInstances is deleted with the instance by default.
        delete_on_termination=nic.get("DeleteOnTermination") is not False,
        ipv6_address_count=ipv6_address_count,
        description=nic.get("Description") or default_description,
        interface_type=kind(nic),
    )


def _key(card: int, index: int) -> Any:
    """Return the key in Instance.nics: moto looks up the primary interface as 0, and has no cards."""
    return index if card == 0 else (card, index)


def _attach(original: Callable[..., str], self: Any, eni: Any, device_index: int) -> str:
    before, self.nics = self.nics, {}
    attachment = original(self, eni, device_index)
    self.nics = {**before, _key(getattr(eni, "network_card_index", 0), int(device_index)): eni}
    return attachment


def _set_card_index(original: Callable[..., None], self: Any, eni: Any) -> None:
    original(self, eni)
    self.network_card_index = getattr(eni, "network_card_index", 0)


def _create_interface(original: Callable[..., Any], self: Any) -> Any:
    subnet = self.ec2_backend.get_subnet(self._get_param("SubnetId"))
    ip_addresses.check_in_subnet(subnet, self._get_param("PrivateIpAddress"))
    return original(self)


def _delete_interface(original: Callable[..., Any], self: Any) -> Any:
    interface = self.ec2_backend.get_network_interface(self._get_param("NetworkInterfaceId"))
    if interface.status == "in-use":
        invalid_value(f"Network interface '{interface.id}' is currently in use.")
    return original(self)


def release(instance: Any) -> None:
    """Release the interfaces of an instance that has ended, now or after the time of the condition
    `lingering`."""
    for interface in list(instance.nics.values()):
        interface.stop()
        ip_addresses.disassociate(interface)
        _ended(instance.ec2_backend)[interface.id] = (time.monotonic(), interface)
    release_ended(instance.ec2_backend)


def release_ended(backend: Any) -> None:
    """Release interfaces of ended instances: those created for them are deleted, others detached.

    With the condition `lingering`, they stay attached for some seconds, in which their security groups cannot
    be deleted: DependencyViolation (EC2 API reference, "DeleteSecurityGroup").
    """
    oldest = time.monotonic() - CONDITIONS.read().lingering.get("interfaces", 0.0)
    for name, (since, interface) in list(_ended(backend).items()):
        if since > oldest:
            continue
        del _ended(backend)[name]
        if interface.delete_on_termination and name in backend.enis:
            interface.delete()
        interface.instance = interface.attachment_id = interface.attach_time = None
        interface.status = "available"


def _ended(backend: Any) -> dict[str, tuple[float, Any]]:
    """Return the interfaces whose instances have ended, by id, and since when."""
    found: dict[str, tuple[float, Any]] = backend_data(backend, "ended_interfaces", dict)
    return found
