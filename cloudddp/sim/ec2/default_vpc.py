"""The default VPC has an internet gateway and a main route to it, which moto leaves out.

"When we create a default VPC, we do the following ...: create an internet gateway and connect it to your default VPC;
add a route to the main route table that points all traffic (0.0.0.0/0) to the internet gateway" (Amazon VPC User Guide,
"Default VPCs").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.patch import wrap


def install() -> None:
    """Patch moto's creation of default VPCs."""
    from moto.ec2.models import EC2Backend

    wrap(EC2Backend, "create_default_vpc", _with_gateway)


def _with_gateway(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(self: Any) -> Any:
        vpc = original(self)
        gateway = self.create_internet_gateway()
        self.attach_internet_gateway(gateway.id, vpc.id)
        (table,) = self.describe_route_tables(filters={"vpc-id": [vpc.id], "association.main": ["true"]})
        self.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
        return vpc

    return create
