"""Assigns reachable addresses to instances.

VPCs may overlap and regions are independent of each other, but all nodes share one network here: no address,
private or public, is assigned to two interfaces at a time. Patches moto's address allocation. In-process AWS
(cloudddp.simulator.aws) does without it: it has no nodes.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cloudddp.simulator.ec2.patch import client_error, override, server_error, wrap


def use_network(network: str, *, public: str | None = None) -> None:
    """Give every region's default VPC the addresses of `network`, a /16, and instances public ones of
    `public`.

    Without `public`, private addresses come from the lower half of `network` (one /20 per zone), public ones
    from its upper half.
    """
    from moto.ec2.models import elastic_ip_addresses, elastic_network_interfaces, vpcs
    from moto.ec2.models.subnets import Subnet

    whole = ipaddress.IPv4Network(network)
    upper = ipaddress.IPv4Network(public) if public else list(whole.subnets(prefixlen_diff=1))[1]

    def create_vpc(
        original: Callable[..., Any], self: Any, cidr_block: str, *args: Any, **kwargs: Any
    ) -> Any:
        block = network if kwargs.get("is_default") else cidr_block
        return original(self, block, *args, **kwargs)

    override(vpcs.VPCBackend, "create_vpc", create_vpc)
    override(Subnet, "get_available_subnet_ip", _next_unused)
    override(Subnet, "request_ip", _request_unused)
    pool = PublicAddressPool(upper)
    for module, name in (
        (elastic_network_interfaces, "random_public_ip"),
        (elastic_ip_addresses, "random_ip"),
    ):
        wrap(module, name, lambda _original: pool.take)


class PublicAddressPool:
    """Public addresses in rotation, so that an address that was just released is not reused at once."""

    def __init__(self, network: ipaddress.IPv4Network) -> None:
        self._size = network.num_addresses
        self._rotation = itertools.cycle(str(address) for address in network.hosts())

    def take(self) -> str:
        """Return a free address. Fails the API request if there is none."""
        used = _public_addresses()
        candidates = itertools.islice(self._rotation, self._size)
        address = next((one for one in candidates if one not in used), None)
        if address is None:
            server_error(
                "InsufficientAddressCapacity",
                "Not enough available addresses to satisfy your minimum request: "
                f"all {len(used)} public addresses of this simulator are in use.",
            )
        return address


def _backends() -> Iterator[Any]:
    """Yield moto's EC2 backends of all accounts and regions that were used so far."""
    from moto.ec2.models import ec2_backends

    for account in list(ec2_backends.values()):
        yield from list(account.values())


def _public_addresses() -> set[str]:
    """Return the public addresses of all interfaces and allocations."""
    return {
        one.public_ip
        for backend in _backends()
        for one in (*list(backend.enis.values()), *list(backend.addresses))
        if one.public_ip
    }


def _used_elsewhere(subnet: Any, address: str) -> bool:
    """Return whether another subnet has assigned this private address."""
    return any(
        address in other._subnet_ips
        for backend in _backends()
        for by_zone in list(backend.subnets.values())
        for other in list(by_zone.values())
        if other is not subnet
    )


def _next_unused(original: Callable[..., Any], self: Any, instance: Any) -> str:
    skipped = []
    try:
        while _used_elsewhere(self, found := str(original(self, instance))):
            skipped.append(found)
        return found
    finally:
        for one in skipped:
            self.del_subnet_ip(one)


def _request_unused(original: Callable[..., None], self: Any, ip: str, instance: Any) -> None:
    if _used_elsewhere(self, ip):
        client_error(
            "InvalidIPAddress.InUse",
            f"Address {ip} is in use in another VPC or region, and in this simulator they share one network.",
        )
    original(self, ip, instance)
