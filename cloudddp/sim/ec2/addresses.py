"""Addresses: the private ones a subnet has, and the Elastic IPs an account holds.

A subnet that is full says so instead of breaking, and stays while something has an interface in it. An Elastic IP takes the place of an instance's public address; what
answers there is the network's business, which looks at the instances after each call.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.limits import CONDITIONS
from cloudddp.sim.ec2.patch import LOCK, refuse, wrap


def install() -> None:
    """Teach moto's subnets, interfaces and Elastic IPs."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.subnets import Subnet
    from moto.ec2.responses.elastic_ip_addresses import ElasticIPAddresses

    wrap(Subnet, "get_available_subnet_ip", _next)
    wrap(Subnet, "available_ip_address_count", _count)
    wrap(EC2Backend, "delete_subnet", _delete_subnet)
    wrap(EC2Backend, "create_network_interface", _give_address)
    wrap(EC2Backend, "delete_network_interface", _take_back)
    wrap(EC2Backend, "allocate_address", _allocate)
    wrap(EC2Backend, "associate_address", _associate)
    wrap(ElasticIPAddresses, "associate_address", _reassociate)
    wrap(EC2Backend, "release_address", _release)


def full(subnet_id: str) -> None:
    """Refuse: the subnet has too few free addresses."""
    refuse(
        "InsufficientFreeAddressesInSubnet",
        f"There are not enough free addresses in subnet '{subnet_id}' to satisfy the requested number of instances.",
    )


def strip(interface: Any) -> None:
    """Make of an interface one without IP (efa-only)."""
    _give_back(interface)
    _clear(interface)


def leave(interface: Any) -> None:
    """Take an Elastic IP from an interface whose instance ends; the address stays allocated, and bills."""
    for elastic in list(interface.ec2_backend.addresses):
        if elastic.eni is interface:
            elastic.instance = elastic.eni = elastic.association_id = None
            interface.public_ip = None


def _next(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def address(self: Any, instance: Any) -> Any:
        try:
            return original(self, instance)
        except StopIteration:
            full(self.id)

    return address


def _count(original: Any) -> property:
    def count(self: Any) -> int:
        free = CONDITIONS.read().free_addresses.get(self.id)
        real = int(original.fget(self))
        return real if free is None else min(real, free)

    return property(count)


def _delete_subnet(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delete(self: Any, subnet_id: str) -> Any:
        with LOCK:
            if any(interface.subnet.id == subnet_id for interface in self.enis.values()):
                refuse(
                    "DependencyViolation",
                    f"The subnet '{subnet_id}' has dependencies and cannot be deleted.",
                )
            return original(self, subnet_id)

    return delete


def _give_address(original: Callable[..., Any]) -> Callable[..., Any]:
    """moto invents addresses at random; here they are the subnet's, no two the same."""

    @functools.wraps(original)
    def create(
        self: Any,
        subnet: Any,
        private_ip_address: Any,
        private_ip_addresses: Any = None,
        *more: Any,
        **kwargs: Any,
    ) -> Any:
        with LOCK:
            subnet = self.get_subnet(subnet) if isinstance(subnet, str) else subnet
            for named in private_ip_addresses or []:
                check_inside(subnet, named["PrivateIpAddress"] if isinstance(named, dict) else named)
            bare = kwargs.get("interface_type") == "efa-only"
            if bare:  # cleared below; without any, moto would invent one
                private_ip_address = str(subnet.cidr.network_address)
            elif not private_ip_addresses:
                private_ip_address = _claim(subnet, private_ip_address, self)
            try:
                interface = original(self, subnet, private_ip_address, private_ip_addresses, *more, **kwargs)
            except Exception:
                subnet.del_subnet_ip(private_ip_address)
                raise
            interface.interface_type = kwargs.get("interface_type") or "interface"
            if bare:
                _clear(interface)
            CONDITIONS.take_addresses(subnet.id, len(interface.private_ip_addresses))
            return interface

    return create


def _claim(subnet: Any, wanted: str | list[str] | None, holder: Any) -> str:
    """Take the address wanted, or any, out of the subnet's."""
    address = wanted[0] if isinstance(wanted, list) and wanted else wanted or ""
    if CONDITIONS.read().free_addresses.get(subnet.id) == 0:
        full(subnet.id)
    if not address or not inside(subnet, str(address)):
        # Where moto invents an address itself (a NAT gateway's), it asks no subnet.
        return str(subnet.get_available_subnet_ip(holder))
    if address in subnet._subnet_ips:
        refuse("InvalidIPAddress.InUse", f"Address {address} is in use.")
    subnet.request_ip(address, holder)
    return str(address)


def inside(subnet: Any, address: str) -> bool:
    """Whether an address is one of the subnet's. Refuses what is no address."""
    try:
        return ipaddress.IPv4Address(address) in subnet.cidr
    except ValueError:
        refuse(
            "InvalidParameterValue",
            f"Value ({address}) for parameter address is invalid. Invalid IPv4 address.",
        )


def check_inside(subnet: Any, address: str | None) -> None:
    """Refuse an address that a request names and the subnet does not have."""
    if address and not inside(subnet, address):
        refuse("InvalidParameterValue", f"Address {address} does not fall within the subnet's address range")


def _take_back(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def delete(self: Any, eni_id: str) -> None:
        with LOCK:
            interface = self.enis.get(eni_id)
            original(self, eni_id)
            _give_back(interface)

    return delete


def _give_back(interface: Any) -> None:
    for address in interface.private_ip_addresses:
        interface.subnet.del_subnet_ip(address["PrivateIpAddress"])
    CONDITIONS.take_addresses(interface.subnet.id, -len(interface.private_ip_addresses))


def _clear(interface: Any) -> None:
    interface.private_ip_address, interface.private_ip_addresses = None, []
    interface.private_dns_name = None


def _allocate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def allocate(self: Any, domain: str, address: str | None = None, **kwargs: Any) -> Any:
        with LOCK:
            if address:  # one of the account's that it has released; nothing is kept here for that
                refuse("InvalidAddress.NotFound", f"Address '{address}' not found.")
            most = CONDITIONS.read().quota.get("addresses")
            if most is not None and len(self.addresses) >= most:
                refuse("AddressLimitExceeded", "The maximum number of addresses has been reached.")
            return original(self, domain, **kwargs)

    return allocate


def _associate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def associate(self: Any, instance: Any = None, eni: Any = None, **kwargs: Any) -> Any:
        with LOCK:
            eni = eni or _only_interface(instance)
            instance = eni.instance
            if not eni.private_ip_address:
                refuse("InvalidParameterValue", f"Network interface '{eni.id}' has no private IP address.")
            if instance is not None and instance.state not in ("running", "stopping", "stopped"):
                refuse(
                    "InvalidInstanceID",
                    f"The {instance.state} instance '{instance.id}' is not in a valid state for this operation.",
                )
            elastic = original(self, instance=instance, eni=eni, **kwargs)
            _take_over(self, elastic, eni)
            return elastic

    return associate


def _take_over(backend: Any, elastic: Any, eni: Any) -> None:
    """End what the association replaces: the interface's other address, the address's other interface."""
    for other in backend.addresses:
        if other is not elastic and other.eni is eni:
            other.instance = other.eni = other.association_id = None
    for interface in backend.enis.values():
        if interface is not eni and interface.public_ip == elastic.public_ip:
            interface.public_ip = None


def _only_interface(instance: Any) -> Any:
    if len(instance.nics) > 1:
        refuse(
            "InvalidInstanceID",
            f"There are multiple interfaces attached to instance '{instance.id}'. "
            "Please specify an interface ID for the operation instead.",
        )
    return instance.nics[0]


def _reassociate(original: Callable[..., Any]) -> Callable[..., Any]:
    """An address moves unless the request forbids it; moto has it the other way round."""

    @functools.wraps(original)
    def associate_address(self: Any) -> Any:
        if self._get_param("AllowReassociation") is None:
            self.params["AllowReassociation"] = True
        return original(self)

    return associate_address


def _release(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def release(self: Any, address: str | None = None, allocation_id: str | None = None) -> None:
        with LOCK:
            (elastic,) = (
                self.address_by_ip([address]) if address else self.address_by_allocation([allocation_id])
            )
            if elastic.eni is not None:
                refuse("InvalidIPAddress.InUse", f"Address {elastic.public_ip} is in use.")
            original(self, address=address, allocation_id=allocation_id)

    return release
