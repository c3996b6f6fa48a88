"""Addresses for instances, so that every one that the API tells can be connected to.

Knows moto's address book and nothing of nodes. In-process rehearsals do without it: nothing listens there.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.aws import wrap


def place(network: str, *, public: str | None = None) -> None:
    """Give every region's default VPC the addresses of `network`, a /16, and instances public ones of `public`.

    Without `public`, private addresses come from the lower half of `network` (one /20 per zone), public ones from
    its upper half.
    """
    from moto.ec2.models import elastic_ip_addresses, elastic_network_interfaces, vpcs
    from moto.ec2.models.subnets import Subnet

    whole = ipaddress.ip_network(network)
    lower, upper = (whole, ipaddress.ip_network(public)) if public else whole.subnets(prefixlen_diff=1)
    free = itertools.cycle(str(address) for address in upper.hosts())
    taken: set[str] = set()

    def create_vpc(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(self: Any, cidr_block: str, *args: Any, **kwargs: Any) -> Any:
            wanted = network if kwargs.get("is_default") else cidr_block
            return original(self, wanted, *args, **kwargs)

        return create

    def next_address(original: Callable[..., Any]) -> Callable[..., str]:
        @functools.wraps(original)
        def address(self: Any, instance: Any) -> str:
            # Regions do not know of each other's addresses, but here they share one machine's loopback.
            while True:
                found = str(original(self, instance))
                if ipaddress.ip_address(found) not in lower:
                    return found
                if found not in taken:
                    taken.add(found)
                    return found

        return address

    def give_back(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def give(self: Any, ip: str) -> None:
            taken.discard(ip)
            original(self, ip)

        return give

    wrap(vpcs.VPCBackend, "create_vpc", create_vpc)
    wrap(Subnet, "get_available_subnet_ip", next_address)
    wrap(Subnet, "del_subnet_ip", give_back)
    for module, name in (
        (elastic_network_interfaces, "random_public_ip"),
        (elastic_ip_addresses, "random_ip"),
    ):
        wrap(module, name, lambda _original: lambda: next(free))
