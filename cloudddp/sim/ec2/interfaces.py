"""Network interfaces of instances: several cards, EFA, and what an instance type does not take.

moto keeps one interface per device index and calls all of them `interface` on card 0. Here an instance's interfaces are
keyed by card and index, carry the type that was asked for, and all end with the instance. Addresses are addresses.py's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2 import addresses, catalog
from cloudddp.sim.ec2.patch import LOCK, refuse, wrap

_KINDS = ("interface", "efa", "efa-only")


def install() -> None:
    """Replace moto's way of giving an instance its interfaces."""
    from moto.ec2.models.elastic_network_interfaces import Attachment
    from moto.ec2.models.instances import Instance
    from moto.ec2.responses.elastic_network_interfaces import ElasticNetworkInterfaces

    wrap(Instance, "prep_nics", lambda _original: _prepare)
    wrap(Instance, "attach_eni", _attach)
    wrap(Instance, "detach_eni", _detach)
    wrap(Instance, "network_interfaces", lambda _original: property(shown))
    wrap(Attachment, "__init__", _tell_card)
    wrap(ElasticNetworkInterfaces, "create_network_interface", _create)
    wrap(ElasticNetworkInterfaces, "attach_network_interface", _attach_later)
    wrap(ElasticNetworkInterfaces, "delete_network_interface", _delete)


def kind(nic: dict[str, Any]) -> str:
    """The interface type a request asks for."""
    return str(nic.get("InterfaceType") or "interface")


def place(nic: dict[str, Any]) -> tuple[int, int]:
    """Network card and device index of a requested interface."""
    return int(nic.get("NetworkCardIndex") or 0), int(nic.get("DeviceIndex") or 0)


def shown(instance: Any) -> list[Any]:
    """The instance's interfaces, the primary one first; none once it is terminated, as on AWS."""
    return [] if instance.state == "terminated" else list(instance.nics.values())


def check(instance_type: str, nics: list[dict[str, Any]], *, count: int, groups: bool) -> None:
    """Refuse interfaces that instances of the type cannot have. `groups`: the request names groups beside them."""
    if not nics:
        return
    if groups:
        refuse(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level security groups may not be specified on the same request",
        )
    _check_places(nics)
    if len(nics) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in nics):
        refuse(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network interfaces.",
        )
    if count > 1 and any(nic.get("NetworkInterfaceId") for nic in nics):
        refuse(
            "InvalidParameterCombination",
            "A network interface may not be specified when launching multiple instances.",
        )
    if network := catalog.network(instance_type):
        _check_type(instance_type, nics, network)


def _check_places(nics: list[dict[str, Any]]) -> None:
    if any(nic.get("DeviceIndex") is None for nic in nics):
        refuse("InvalidParameterValue", "Each network interface requires a device index.")
    places = [place(nic) for nic in nics]
    if len(set(places)) < len(places):
        refuse("InvalidParameterValue", "Each network interface requires a unique device index.")
    if (0, 0) not in places:
        refuse(
            "InvalidParameterValue", "A network interface with device index 0 on network card 0 is required."
        )
    for nic in nics:
        if kind(nic) not in _KINDS:
            refuse("InvalidParameterValue", f"Value ({kind(nic)}) for parameter interfaceType is invalid.")
        if kind(nic) == "efa-only" and place(nic) == (0, 0):
            refuse("InvalidParameterCombination", "The primary network interface cannot be of type efa-only.")
        if kind(nic) == "efa-only" and (nic.get("PrivateIpAddress") or nic.get("AssociatePublicIpAddress")):
            refuse("InvalidParameterCombination", "An efa-only network interface cannot have IP addresses.")


def _check_type(instance_type: str, nics: list[dict[str, Any]], network: dict[str, Any]) -> None:
    cards = {int(card["NetworkCardIndex"]): card for card in network.get("NetworkCards", [])}
    for card, _ in map(place, nics):
        if card not in cards:
            refuse(
                "InvalidParameterValue",
                f"Network card index {card} exceeds the limit for {instance_type}, "
                f"which has {len(cards)} network card(s).",
            )
    _check_efa(instance_type, nics, network, cards)
    if len(nics) > network["MaximumNetworkInterfaces"]:
        refuse(
            "AttachmentLimitExceeded", f"Interface count {len(nics)} exceeds the limit for {instance_type}"
        )
    for card, asked in Counter(card for card, _ in map(place, nics)).items():
        if asked > cards[card]["MaximumNetworkInterfaces"]:
            refuse(
                "AttachmentLimitExceeded",
                f"Interface count {asked} exceeds the limit of {cards[card]['MaximumNetworkInterfaces']} "
                f"for {instance_type} on network card {card}",
            )


def _check_efa(
    instance_type: str, nics: list[dict[str, Any]], network: dict[str, Any], cards: dict[int, dict[str, Any]]
) -> None:
    efas = [nic for nic in nics if kind(nic) != "interface"]
    if efas and not network.get("EfaSupported"):
        refuse("UnsupportedOperation", f"EFA interfaces are not supported on {instance_type}")
    for nic in efas:
        card, _ = place(nic)
        if kind(nic) not in cards[card].get("InterfaceTypes", _KINDS):
            refuse(
                "UnsupportedOperation",
                f"Interfaces of type {kind(nic)} are not supported on network card {card} of {instance_type}",
            )
    most = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    if len(efas) > most:
        refuse(
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
    """Make a new instance's interfaces, the primary one first."""
    instance.nics = {}
    wishes = sorted(nic_spec or [{"DeviceIndex": 0}], key=place)
    primary = wishes[0]
    if len(wishes) > 1:
        associate_public_ip = False
    elif primary.get("AssociatePublicIpAddress") is not None:
        associate_public_ip = bool(primary["AssociatePublicIpAddress"])
    for wish in wishes:
        interface = _existing(instance, wish) or _made(
            instance,
            wish,
            private_ip=_private_ip(wish) or (private_ip if wish is primary else None),
            public=bool(associate_public_ip) and wish is primary,
            groups=[*(wish.get("Groups") or []), *(group.id for group in security_groups or [])],
            ipv6_address_count=ipv6_address_count,
        )
        interface.network_card_index = place(wish)[0]
        instance.attach_eni(interface, place(wish)[1])
    if not instance.security_groups:
        instance.security_groups = list(instance.nics[0]._group_set)


def _private_ip(wish: dict[str, Any]) -> str | None:
    primary = [a["PrivateIpAddress"] for a in wish.get("PrivateIpAddresses") or [] if a.get("Primary")]
    return wish.get("PrivateIpAddress") or (primary[0] if primary else None)


def _existing(instance: Any, wish: dict[str, Any]) -> Any:
    if not wish.get("NetworkInterfaceId"):
        return None
    interface = instance.ec2_backend.get_network_interface(wish["NetworkInterfaceId"])
    if interface.instance is not None:
        refuse("InvalidNetworkInterface.InUse", f"Interface: [{interface.id}] in use.")
    interface.public_ip_auto_assign = False
    interface.delete_on_termination = wish.get("DeleteOnTermination") is True
    return interface


def _made(
    instance: Any,
    wish: dict[str, Any],
    *,
    private_ip: str | None,
    public: bool,
    groups: list[str],
    ipv6_address_count: int | None,
) -> Any:
    backend = instance.ec2_backend
    primary = place(wish) == (0, 0)
    subnet = backend.get_subnet(wish.get("SubnetId") or instance.subnet_id)
    addresses.check_inside(subnet, private_ip)
    return backend.create_network_interface(
        subnet,
        private_ip,
        device_index=place(wish)[1],
        public_ip_auto_assign=public,
        group_ids=groups,
        # An interface made by RunInstances dies with the instance unless the request says otherwise.
        delete_on_termination=wish.get("DeleteOnTermination") is not False,
        ipv6_address_count=ipv6_address_count,
        description=wish.get("Description") or ("Primary network interface" if primary else None),
        interface_type=kind(wish),
    )


def _key(card: int, index: int) -> Any:
    """moto looks for the primary interface at 0, and knows no cards."""
    return index if card == 0 else (card, index)


def _attach(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def attach(self: Any, eni: Any, device_index: int) -> str:
        before, self.nics = self.nics, {}
        attachment = original(self, eni, device_index)
        self.nics = {**before, _key(getattr(eni, "network_card_index", 0), int(device_index)): eni}
        return attachment

    return attach


def _detach(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def detach(self: Any, eni: Any) -> None:
        kept = {key: nic for key, nic in self.nics.items() if nic is not eni}
        original(self, eni)
        self.nics = kept
        eni.network_card_index = 0

    return detach


def _tell_card(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def create(self: Any, eni: Any) -> None:
        original(self, eni)
        self.network_card_index = getattr(eni, "network_card_index", 0)

    return create


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(self: Any) -> Any:
        wanted = self._get_param("InterfaceType") or "interface"
        with LOCK:
            subnet = self.ec2_backend.get_subnet(self._get_param("SubnetId"))
            addresses.check_inside(subnet, self._get_param("PrivateIpAddress"))
            answer = original(self)
            interface = answer.result["NetworkInterface"]
            interface.interface_type = wanted
            if wanted == "efa-only":
                addresses.strip(interface)
        return answer

    return create


def _attach_later(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attach(self: Any) -> Any:
        with LOCK:
            interface = self.ec2_backend.get_network_interface(self._get_param("NetworkInterfaceId"))
            instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
            if interface.instance is not None:
                refuse("InvalidNetworkInterface.InUse", f"Interface: [{interface.id}] in use.")
            wish = _wish(
                interface, self._get_int_param("NetworkCardIndex") or 0, self._get_int_param("DeviceIndex")
            )
            if kind(wish) != "interface" and instance.state != "stopped":
                refuse("IncorrectInstanceState", "An EFA can be attached to a stopped instance only.")
            has = [
                _wish(eni, getattr(eni, "network_card_index", 0), eni.device_index) for eni in shown(instance)
            ]
            check(instance.instance_type, [*has, wish], count=1, groups=False)
            interface.network_card_index = place(wish)[0]
            return original(self)

    return attach


def _wish(interface: Any, card: int, index: int | None) -> dict[str, Any]:
    """An interface there is, in the form in which one is asked for."""
    return {"NetworkCardIndex": card, "DeviceIndex": index, "InterfaceType": interface.interface_type}


def _delete(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete(self: Any) -> Any:
        with LOCK:
            interface = self.ec2_backend.get_network_interface(self._get_param("NetworkInterfaceId"))
            if interface.status == "in-use":
                refuse("InvalidParameterValue", f"Network interface '{interface.id}' is currently in use.")
            return original(self)

    return delete


def release(instance: Any) -> None:
    """Take the interfaces from an instance that has ended: those made for it go, others are free again."""
    for interface in list(instance.nics.values()):
        addresses.leave(interface)
        if interface.delete_on_termination and interface.id in instance.ec2_backend.enis:
            interface.delete()
        interface.instance = interface.attachment_id = interface.attach_time = None
        interface.status = "available"
