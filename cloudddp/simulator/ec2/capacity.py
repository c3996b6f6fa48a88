"""How many instances EC2 grants a request: offerings by zone, capacity, quotas, free addresses.

Decides between a request's minimum and maximum count, and raises the error for what is short. The limits are
set as conditions (cloudddp/simulator/conditions); without a condition there is no limit.
DescribeAccountAttributes and GetServiceQuota show the quotas: moto's limit of Elastic IPs is always 5, and it
knows only the quotas of VPC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from cloudddp.simulator.ec2 import catalog, ip_addresses
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import client_error, override, server_error

_COUNTED = ("pending", "running")  # instance states that count against a quota
_ADDRESSES = ("max-elastic-ips", "vpc-max-elastic-ips")


UNLIMITED = 100_000.0  # without a condition, nothing is limited

# quota code -> name of the condition; the codes are those of service `ec2`
_CODES = {
    "L-DB2E81BA": "on-demand-g",
    "L-417A185B": "on-demand-p",
    "L-1216C47A": "on-demand-standard",
    "L-3819A6DF": "spot-g",
    "L-7212CCBC": "spot-p",
    "L-C4BD4855": "spot-p5",
    "L-34B43A08": "spot-standard",
    "L-0263D0A3": "addresses",
}


def install() -> None:
    """Patch moto's answers."""
    from moto.ec2.responses.account_attributes import AccountAttributes
    from moto.servicequotas.models import ServiceQuotasBackend

    override(AccountAttributes, "describe_account_attributes", _describe)
    override(ServiceQuotasBackend, "get_service_quota", _with_ec2)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch needs. `addresses`: private addresses per instance, by subnet id."""

    instance_type: str
    zone: str
    names_zone: bool  # whether the request does
    spot: bool
    min_count: int
    max_count: int
    addresses: Mapping[str, int]
    reserved: bool = False  # into a capacity reservation, which has taken its capacity already
    # Into a capacity block, which does not count against the quota of on-demand instances.
    block: bool = False


def grant(backend: Any, launch: Launch) -> int:
    """Return how many instances to launch. Fails the request if that is less than `min_count`."""
    _check_offering(backend, launch)
    granted = launch.max_count if launch.block else min(launch.max_count, _within_quota(backend, launch))
    granted = min(granted, _within_subnets(backend, launch, granted))
    limits = [] if launch.reserved else [CONDITIONS.capacity(launch.zone, launch.instance_type)]
    if launch.spot:
        limits.append(CONDITIONS.spot_capacity(launch.zone, launch.instance_type))
    available = min((one for one in limits if one is not None), default=None)
    if available is not None and available < launch.min_count:
        _insufficient_capacity(backend, launch)
    return granted if available is None else min(granted, available)


def allocate(instance: Any) -> None:
    """Use capacity of the zone for an instance."""
    zone, instance_type = instance._capacity = zone_of(instance), instance.instance_type
    CONDITIONS.use_capacity(zone, instance_type, 1)


def release(instance: Any) -> None:
    """Free the capacity of an instance. No effect for one that has none: stopped, or not completely
    launched."""
    if _is_allocated(instance):
        zone, instance_type = instance._capacity
        instance._capacity = None
        CONDITIONS.use_capacity(zone, instance_type, -1)


def _is_allocated(instance: Any) -> bool:
    return getattr(instance, "_capacity", None) is not None


def zone_of(instance: Any) -> str:
    """Return the zone of the instance's primary interface. moto may show another one for the instance."""
    return str(instance.nics[0].availability_zone)


def choose_zone(backend: Any, instance_type: str, min_count: int, zones: list[str]) -> str:
    """Return the zone for a request that names none, out of those with a default subnet."""
    offered = [zone for zone in zones if zone in catalog.zones(backend.region_name, instance_type)]
    available = [zone for zone in offered if _fits(zone, instance_type, min_count)]
    return (available or offered or zones)[0]


def _fits(zone: str, instance_type: str, count: int) -> bool:
    available = CONDITIONS.capacity(zone, instance_type)
    return available is None or available >= count


def _check_offering(backend: Any, launch: Launch) -> None:
    offered = catalog.zones(backend.region_name, launch.instance_type)
    if launch.zone in offered:
        return
    if not offered:
        client_error(
            "Unsupported",
            "The requested configuration is currently not supported. Please check the documentation for "
            "supported configurations.",
        )
    client_error(
        "Unsupported",
        f"Your requested instance type ({launch.instance_type}) is not supported in your requested "
        f"Availability Zone ({launch.zone}). Please retry your request by not specifying an Availability "
        f"Zone or choosing {', '.join(offered)}.",
    )


def _insufficient_capacity(backend: Any, launch: Launch) -> NoReturn:
    if launch.spot:
        server_error(
            "InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request."
        )
    others = [
        zone
        for zone in catalog.zones(backend.region_name, launch.instance_type)
        if zone != launch.zone and _fits(zone, launch.instance_type, launch.min_count)
    ]
    where = (
        f"in the Availability Zone you requested ({launch.zone})" if launch.names_zone else "in this region"
    )
    hint = (
        f"You can currently get {launch.instance_type} capacity by not specifying an Availability Zone in "
        f"your request or choosing {', '.join(others)}."
        if others
        else ""
    )
    server_error(
        "InsufficientInstanceCapacity",
        f"We currently do not have sufficient {launch.instance_type} capacity {where}. Our system will be "
        f"working on provisioning additional capacity. {hint}".strip(),
    )


def _within_quota(backend: Any, launch: Launch) -> int:
    limits = CONDITIONS.read().quota
    name = catalog.quota(launch.instance_type, spot=launch.spot)
    if name not in limits:
        return launch.max_count
    used = sum(
        catalog.vcpus(instance.instance_type)
        for instance in backend.all_instances()
        if _counts(instance)
        and catalog.quota(instance.instance_type, spot=instance.lifecycle == "spot") == name
    )
    fit = max(0, limits[name] - used) // max(1, catalog.vcpus(launch.instance_type))
    if fit < launch.min_count:
        _over_quota(launch, limits[name])
    return fit


def _counts(instance: Any) -> bool:
    """Return whether the instance counts against a quota; also one that the same request is about to
    start."""
    return instance.state in _COUNTED or (instance.state == "stopped" and _is_allocated(instance))


def _over_quota(launch: Launch, limit: int) -> NoReturn:
    if launch.spot:
        client_error("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    client_error(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def _within_subnets(backend: Any, launch: Launch, max_count: int) -> int:
    fit = max_count
    for subnet_id, each in launch.addresses.items():
        free = backend.get_subnet(subnet_id).available_ip_address_count // each
        if free < launch.min_count:
            ip_addresses.subnet_full(subnet_id)
        fit = min(fit, free)
    return fit


def addresses_of(nics: list[dict[str, Any]], default_subnet: str | None) -> Counter[str]:
    """Return how many private addresses one instance with these interfaces needs, by subnet id."""
    needed: Counter[str] = Counter()
    for nic in nics or [{}]:
        subnet = nic.get("SubnetId") or default_subnet
        if subnet and not nic.get("NetworkInterfaceId") and nic.get("InterfaceType") != "efa-only":
            needed[subnet] += 1
    return needed


def _describe(original: Callable[..., Any], self: Any) -> Any:
    answer = original(self)
    wanted = self._get_param("AttributeNames", [])
    quota = CONDITIONS.read().quota.get("addresses")
    shown = [
        one for one in answer.result["AccountAttributes"] if not wanted or one["AttributeName"] in wanted
    ]
    for one in shown:
        if quota is not None and one["AttributeName"] in _ADDRESSES:
            one["AttributeValues"] = [{"AttributeValue": str(quota)}]
    answer.result["AccountAttributes"] = shown
    return answer


def _with_ec2(original: Callable[..., Any], self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
    if service_code != "ec2" or quota_code not in _CODES:
        return dict(original(self, service_code=service_code, quota_code=quota_code))
    limit = CONDITIONS.read().quota.get(_CODES[quota_code], UNLIMITED)
    return {"ServiceCode": "ec2", "QuotaCode": quota_code, "Value": float(limit), "Adjustable": True}
