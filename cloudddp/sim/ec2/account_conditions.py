"""The conditions of this process, and the names that they may refer to."""

from __future__ import annotations

from cloudddp.sim.conditions.reading import Names
from cloudddp.sim.conditions.store import Store
from cloudddp.sim.ec2 import catalog


def _names() -> Names:
    from moto.ec2.models import ec2_backends

    subnets = {
        subnet.id
        for account in list(ec2_backends.values())
        for backend in list(account.values())
        for by_zone in list(backend.subnets.values())
        for subnet in list(by_zone.values())
    }
    vpcs = {
        vpc
        for account in list(ec2_backends.values())
        for backend in list(account.values())
        for vpc in list(backend.vpcs)
    }
    return Names(catalog.all_zones(), catalog.types(), catalog.actions(), frozenset(subnets), frozenset(vpcs))


CONDITIONS = Store(_names)
