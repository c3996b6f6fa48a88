"""Addresses for instances, so that every one that the API tells can be connected to.

VPCs may overlap and regions do not know of each other, but here they share one network: no address, private or public,
is given to a second interface while a first one has it. Knows moto's address book and nothing of nodes. In-process
rehearsals do without it: nothing listens there.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cloudddp.sim.ec2.patch import fail, refuse, wrap


def place(network: str, *, public: str | None = None) -> None:
    """Give every region's default VPC the addresses of `network`, a /16, and instances public ones of `public`.

    Without `public`, private addresses come from the lower half of `network` (one /20 per zone), public ones from
    its upper half.
    """
    from moto.ec2.models import elastic_ip_addresses, elastic_network_interfaces, vpcs
    from moto.ec2.models.subnets import Subnet

    whole = ipaddress.IPv4Network(network)
    upper = ipaddress.IPv4Network(public) if public else list(whole.subnets(prefixlen_diff=1))[1]

    def create_vpc(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(self: Any, cidr_block: str, *args: Any, **kwargs: Any) -> Any:
            wanted = network if kwargs.get("is_default") else cidr_block
            return original(self, wanted, *args, **kwargs)

        return create

    wrap(vpcs.VPCBackend, "create_vpc", create_vpc)
    wrap(Subnet, "get_available_subnet_ip", _next)
    wrap(Subnet, "request_ip", _request)
    pool = Pool(upper)
    for module, name in (
        (elastic_network_interfaces, "random_public_ip"),
        (elastic_ip_addresses, "random_ip"),
    ):
        wrap(module, name, lambda _original: pool.take)


class Pool:
    """Public addresses, handed out in turn, so that one that was given back is not the next instance's at once."""

    def __init__(self, network: ipaddress.IPv4Network) -> None:
        self._size = network.num_addresses
        self._turns = itertools.cycle(str(address) for address in network.hosts())

    def take(self) -> str:
        """One that nothing has now. Answers the request with an error where there is none."""
        used = _public()
        free = (one for one in itertools.islice(self._turns, self._size) if one not in used)
        address = next(free, None)
        if address is None:
            fail(
                "InsufficientAddressCapacity",
                "Not enough available addresses to satisfy your minimum request: "
                f"all {len(used)} public addresses of this simulator are in use.",
            )
        return address


def _backends() -> Iterator[Any]:
    """What moto has of every account and region so far."""
    from moto.ec2.models import ec2_backends

    for account in list(ec2_backends.values()):
        yield from list(account.values())


def _public() -> set[str]:
    """The public addresses that an interface has, or an account holds."""
    return {
        one.public_ip
        for backend in _backends()
        for one in (*list(backend.enis.values()), *list(backend.addresses))
        if one.public_ip
    }


def _elsewhere(subnet: Any, address: str) -> bool:
    """Whether another subnet has given this private address away."""
    return any(
        address in other._subnet_ips
        for backend in _backends()
        for by_zone in list(backend.subnets.values())
        for other in list(by_zone.values())
        if other is not subnet
    )


def _next(original: Callable[..., Any]) -> Callable[..., str]:
    @functools.wraps(original)
    def address(self: Any, instance: Any) -> str:
        passed = []
        try:
            while _elsewhere(self, found := str(original(self, instance))):
                passed.append(found)
            return found
        finally:
            for one in passed:
                self.del_subnet_ip(one)

    return address


def _request(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def request(self: Any, ip: str, instance: Any) -> None:
        if _elsewhere(self, ip):
            refuse(
                "InvalidIPAddress.InUse",
                f"Address {ip} is in use in another VPC or region, and in this simulator they share one network.",
            )
        original(self, ip, instance)

    return request
