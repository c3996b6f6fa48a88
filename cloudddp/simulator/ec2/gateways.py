"""Internet gateways and routes to them: what a new account has, and what EC2 refuses.

The default VPC has an internet gateway and a main route table with a route to it for 0.0.0.0/0 ("Default VPC
components", https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html); moto's has
neither. A route whose target is gone is a `blackhole`; moto shows every route as active. The lab's router
follows the records (net/security_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.simulator.ec2.patch import client_error, invalid_value, override, wrap


def install() -> None:
    """Patch moto's VPCs, route tables and internet gateways."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.route_tables import Route

    override(EC2Backend, "create_default_vpc", _create_default_vpc)
    override(EC2Backend, "create_route", _create_route)
    wrap(Route, "state", lambda _: property(_state))


def attached_gateway(backend: Any, vpc_id: str) -> Any | None:
    """Return moto's internet gateway of a VPC, or None."""
    gateways = list(backend.internet_gateways.values())
    return next((one for one in gateways if one.vpc is not None and one.vpc.id == vpc_id), None)


def require_gateway(backend: Any, vpc_id: str) -> None:
    """Fail the request if the VPC has no internet gateway: EC2 associates no Elastic IP there."""
    if attached_gateway(backend, vpc_id) is None:
        client_error("Gateway.NotAttached", f"Network {vpc_id} is not attached to any internet gateway")


def _create_default_vpc(original: Callable[..., Any], self: Any) -> Any:
    vpc = original(self)
    gateway = self.create_internet_gateway()
    self.attach_internet_gateway(gateway.id, vpc.id)
    main = next(one for one in self.route_tables.values() if one.vpc_id == vpc.id)
    self.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)
    return vpc


def _create_route(
    original: Callable[..., Any], self: Any, route_table_id: str, *args: Any, **kwargs: Any
) -> Any:
    gateway_id = kwargs.get("gateway_id") or ""
    if gateway_id.startswith("igw-"):
        gateway, table = self.get_internet_gateway(gateway_id), self.get_route_table(route_table_id)
        if gateway.vpc is None or gateway.vpc.id != table.vpc_id:
            invalid_value(
                f"route table {route_table_id} and network gateway {gateway_id} belong to different networks"
            )
    return original(self, route_table_id, *args, **kwargs)


def _state(route: Any) -> str:
    backend, vpc_id = route.route_table.ec2_backend, route.route_table.vpc_id
    gateway_id = getattr(route.gateway, "id", "")
    if gateway_id.startswith("igw-"):
        attached = attached_gateway(backend, vpc_id)
        return "active" if attached is not None and attached.id == gateway_id else "blackhole"
    if route.nat_gateway is not None and route.nat_gateway.state != "available":
        return "blackhole"
    return "active"
