"""Private addresses of subnets, and Elastic IPs.

A full subnet answers with EC2's error, and a subnet with interfaces cannot be deleted. An Elastic IP replaces
an instance's public address; the lab's router follows after each call.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.gateways import require_gateway
from cloudddp.simulator.ec2.patch import client_error, invalid_value, override, wrap


def install() -> None:
    """Patch moto's subnets, interfaces and Elastic IPs."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.subnets import Subnet
    from moto.ec2.responses.elastic_ip_addresses import ElasticIPAddresses

    override(Subnet, "get_available_subnet_ip", _next_address)
    wrap(Subnet, "available_ip_address_count", _count_available)
    override(EC2Backend, "delete_subnet", _delete_subnet)
    override(EC2Backend, "create_network_interface", _create_interface)
    override(EC2Backend, "delete_network_interface", _delete_interface)
    override(EC2Backend, "allocate_address", _allocate)
    override(EC2Backend, "associate_address", _associate)
    override(ElasticIPAddresses, "associate_address", _allow_reassociation)
    override(EC2Backend, "release_address", _release)


def subnet_full(subnet_id: str) -> None:
    """Fail the request: the subnet has too few free addresses."""
    client_error(
        "InsufficientFreeAddressesInSubnet",
        f"There are not enough free addresses in subnet '{subnet_id}' to satisfy the requested number of "
        "instances.",
    )


def disassociate(interface: Any) -> None:
    """Disassociate the Elastic IP of an interface whose instance ends; it stays allocated, and is billed."""
    for elastic in list(interface.ec2_backend.addresses):
        if elastic.eni is interface:
            elastic.instance = elastic.eni = elastic.association_id = None
            interface.public_ip = None


def _next_address(original: Callable[..., Any], self: Any, instance: Any) -> Any:
    try:
        return original(self, instance)
    except StopIteration:
        subnet_full(self.id)


def _count_available(original: Any) -> property:
    def count(self: Any) -> int:
        limit = CONDITIONS.read().free_addresses.get(self.id)
        available = int(original.fget(self))
        return available if limit is None else min(available, limit)

    return property(count)


def _delete_subnet(original: Callable[..., Any], self: Any, subnet_id: str) -> Any:
    if any(interface.subnet.id == subnet_id for interface in self.enis.values()):
        client_error(
            "DependencyViolation",
            f"The subnet '{subnet_id}' has dependencies and cannot be deleted.",
        )
    return original(self, subnet_id)


def _create_interface(
    original: Callable[..., Any],
    self: Any,
    subnet: Any,
    private_ip_address: Any,
    private_ip_addresses: Any = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Assign unique addresses of the subnet: moto assigns random ones."""
    subnet = self.get_subnet(subnet) if isinstance(subnet, str) else subnet
    for one in private_ip_addresses or []:
        check_in_subnet(subnet, one["PrivateIpAddress"] if isinstance(one, dict) else one)
    without_address = kwargs.get("interface_type") == "efa-only"
    if without_address:  # removed below; given none, moto would assign one
        private_ip_address = str(subnet.cidr.network_address)
    elif not private_ip_addresses:
        private_ip_address = _assign(subnet, private_ip_address, self)
    try:
        interface = original(self, subnet, private_ip_address, private_ip_addresses, *more, **kwargs)
    except Exception:
        subnet.del_subnet_ip(private_ip_address)
        raise
    interface.interface_type = kwargs.get("interface_type") or "interface"
    if without_address:
        _clear(interface)
    CONDITIONS.use_addresses(subnet.id, len(interface.private_ip_addresses))
    return interface


def _assign(subnet: Any, requested: str | list[str] | None, backend: Any) -> str:
    """Assign the requested address of the subnet, or any."""
    address = requested[0] if isinstance(requested, list) and requested else requested or ""
    if CONDITIONS.read().free_addresses.get(subnet.id) == 0:
        subnet_full(subnet.id)
    if not address or not in_subnet(subnet, str(address)):
        # Outside the subnet only if moto has chosen it at random, as for a NAT gateway.
        return str(subnet.get_available_subnet_ip(backend))
    # moto has given it to the mount target of EFS whose interface this is.
    if hasattr(subnet._subnet_ips.get(address), "set_network_interface"):
        return str(address)
    if address in subnet._subnet_ips:
        client_error("InvalidIPAddress.InUse", f"Address {address} is in use.")
    subnet.request_ip(address, backend)
    return str(address)


def in_subnet(subnet: Any, address: str) -> bool:
    """Return whether an address belongs to the subnet. Fails the request for an invalid address."""
    try:
        return ipaddress.IPv4Address(address) in subnet.cidr
    except ValueError:
        invalid_value(f"Value ({address}) for parameter address is invalid. Invalid IPv4 address.")


def check_in_subnet(subnet: Any, address: str | None) -> None:
    """Fail the request for an address outside the subnet."""
    if address and not in_subnet(subnet, address):
        invalid_value(f"Address {address} does not fall within the subnet's address range")


def _delete_interface(original: Callable[..., None], self: Any, eni_id: str) -> None:
    interface = self.enis.get(eni_id)
    original(self, eni_id)
    _free(interface)


def _free(interface: Any) -> None:
    for address in interface.private_ip_addresses:
        interface.subnet.del_subnet_ip(address["PrivateIpAddress"])
    CONDITIONS.use_addresses(interface.subnet.id, -len(interface.private_ip_addresses))


def _clear(interface: Any) -> None:
    interface.private_ip_address, interface.private_ip_addresses = None, []
    interface.private_dns_name = None


def _allocate(
    original: Callable[..., Any], self: Any, domain: str, address: str | None = None, **kwargs: Any
) -> Any:
    if address:  # recovering a released address is not simulated
        client_error("InvalidAddress.NotFound", f"Address '{address}' not found.")
    # "Error codes for the Amazon EC2 API" in the EC2 API reference; the quota: EC2 User Guide, "Elastic IP
    # addresses".
    quota = CONDITIONS.read().quota.get("addresses")
    if quota is not None and len(self.addresses) >= quota:
        client_error("AddressLimitExceeded", "The maximum number of addresses has been reached.")
    return original(self, domain, **kwargs)


def _associate(
    original: Callable[..., Any], self: Any, instance: Any = None, eni: Any = None, **kwargs: Any
) -> Any:
    eni = eni or _only_interface(instance)
    instance = eni.instance
    if not eni.private_ip_address:
        invalid_value(f"Network interface '{eni.id}' has no private IP address.")
    require_gateway(self, eni.subnet.vpc_id)
    if instance is not None and instance.state not in ("running", "stopping", "stopped"):
        client_error(
            "InvalidInstanceID",
            f"The {instance.state} instance '{instance.id}' is not in a valid state for this operation.",
        )
    elastic = original(self, instance=instance, eni=eni, **kwargs)
    _end_replaced(self, elastic, eni)
    return elastic


def _end_replaced(backend: Any, elastic: Any, eni: Any) -> None:
    """End the associations that a new one replaces: the interface's other address, the address's other
    interface."""
    for other in backend.addresses:
        if other is not elastic and other.eni is eni:
            other.instance = other.eni = other.association_id = None
    for interface in backend.enis.values():
        if interface is not eni and interface.public_ip == elastic.public_ip:
            interface.public_ip = None


def _only_interface(instance: Any) -> Any:
    if len(instance.nics) > 1:
        client_error(
            "InvalidInstanceID",
            f"There are multiple interfaces attached to instance '{instance.id}'. "
            "Please specify an interface ID for the operation instead.",
        )
    return instance.nics[0]


def _allow_reassociation(original: Callable[..., Any], self: Any) -> Any:
    """Let an address move by default, as EC2 does in a VPC; moto requires AllowReassociation."""
    if self._get_param("AllowReassociation") is None:
        self.params["AllowReassociation"] = True
    return original(self)


def _release(
    original: Callable[..., None], self: Any, address: str | None = None, allocation_id: str | None = None
) -> None:
    (elastic,) = self.address_by_ip([address]) if address else self.address_by_allocation([allocation_id])
    if elastic.eni is not None:
        client_error("InvalidIPAddress.InUse", f"Address {elastic.public_ip} is in use.")
    original(self, address=address, allocation_id=allocation_id)
