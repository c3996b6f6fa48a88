"""How many instances EC2 has for one: offers by zone, capacity, quotas, free addresses.

The rules that decide between what a request asks at least and at most, and the error that names what was short. What
there is of each is set by conditions.py; unset means enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from cloudddp.sim.ec2 import addresses, catalog
from cloudddp.sim.ec2.limits import CONDITIONS
from cloudddp.sim.ec2.patch import fail, refuse

_COUNTED = ("pending", "running")  # what a quota counts


@dataclass(frozen=True, slots=True)
class Wish:
    """A launch as far as capacity goes. `addresses`: private addresses per instance, by subnet id."""

    instance_type: str
    zone: str
    chosen: bool  # whether the request names the zone
    spot: bool
    least: int
    most: int
    addresses: Mapping[str, int]


def grant(backend: Any, wish: Wish) -> int:
    """How many instances to launch, from `least` to `most`. Refuses less than `least`."""
    _check_offer(backend, wish)
    granted = min(wish.most, _within_quota(backend, wish))
    granted = min(granted, _within_subnets(backend, wish, granted))
    room = CONDITIONS.room(wish.zone, wish.instance_type)
    if room is not None and room < wish.least:
        _sold_out(backend, wish)
    return granted if room is None else min(granted, room)


def take(instance: Any) -> None:
    """The instance has a place in its zone from now on."""
    zone, kind = instance._place = zone_of(instance), instance.instance_type
    CONDITIONS.occupy(zone, kind, 1)


def leave(instance: Any) -> None:
    """The instance gives its place back, if it has one: a launch that failed half way and a stopped one have none."""
    if _has_place(instance):
        zone, kind = instance._place
        instance._place = None
        CONDITIONS.occupy(zone, kind, -1)


def _has_place(instance: Any) -> bool:
    return getattr(instance, "_place", None) is not None


def zone_of(instance: Any) -> str:
    """The zone of the instance's primary interface, which is the instance's; moto may show another."""
    return str(instance.nics[0].availability_zone)


def zone_with_room(backend: Any, instance_type: str, least: int, zones: list[str]) -> str:
    """The zone that EC2 picks for a request that names none, out of those that have a default subnet."""
    offered = [zone for zone in zones if zone in catalog.zones(backend.region_name, instance_type)]
    roomy = [zone for zone in offered if _fits(zone, instance_type, least)]
    return (roomy or offered or zones)[0]


def _fits(zone: str, instance_type: str, count: int) -> bool:
    room = CONDITIONS.room(zone, instance_type)
    return room is None or room >= count


def _check_offer(backend: Any, wish: Wish) -> None:
    offered = catalog.zones(backend.region_name, wish.instance_type)
    if wish.zone in offered:
        return
    if not offered:
        refuse(
            "Unsupported",
            "The requested configuration is currently not supported. Please check the documentation for supported configurations.",
        )
    refuse(
        "Unsupported",
        f"Your requested instance type ({wish.instance_type}) is not supported in your requested Availability Zone "
        f"({wish.zone}). Please retry your request by not specifying an Availability Zone or choosing "
        f"{', '.join(offered)}.",
    )


def _sold_out(backend: Any, wish: Wish) -> NoReturn:
    if wish.spot:
        fail("InsufficientInstanceCapacity", "There is no Spot capacity available that matches your request.")
    others = [
        zone
        for zone in catalog.zones(backend.region_name, wish.instance_type)
        if zone != wish.zone and _fits(zone, wish.instance_type, wish.least)
    ]
    where = f"in the Availability Zone you requested ({wish.zone})" if wish.chosen else "in this region"
    hint = (
        f"You can currently get {wish.instance_type} capacity by not specifying an Availability Zone in your request "
        f"or choosing {', '.join(others)}."
        if others
        else ""
    )
    fail(
        "InsufficientInstanceCapacity",
        f"We currently do not have sufficient {wish.instance_type} capacity {where}. Our system will be working on "
        f"provisioning additional capacity. {hint}".strip(),
    )


def _within_quota(backend: Any, wish: Wish) -> int:
    limits = CONDITIONS.read().quota
    name = catalog.quota(wish.instance_type, spot=wish.spot)
    if name not in limits:
        return wish.most
    used = sum(
        catalog.vcpus(instance.instance_type)
        for instance in backend.all_instances()
        if _counts(instance)
        and catalog.quota(instance.instance_type, spot=instance.lifecycle == "spot") == name
    )
    fit = max(0, limits[name] - used) // max(1, catalog.vcpus(wish.instance_type))
    if fit < wish.least:
        _over_quota(wish, limits[name])
    return fit


def _counts(instance: Any) -> bool:
    """Whether a quota counts the instance; also one that the same request is about to start."""
    return instance.state in _COUNTED or (instance.state == "stopped" and _has_place(instance))


def _over_quota(wish: Wish, limit: int) -> NoReturn:
    if wish.spot:
        refuse("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    refuse(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the instance "
        "bucket that the specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request "
        "to request an adjustment to this limit.",
    )


def _within_subnets(backend: Any, wish: Wish, most: int) -> int:
    fit = most
    for subnet_id, each in wish.addresses.items():
        free = backend.get_subnet(subnet_id).available_ip_address_count // each
        if free < wish.least:
            addresses.full(subnet_id)
        fit = min(fit, free)
    return fit


def addresses_of(nics: list[dict[str, Any]], default_subnet: str | None) -> Counter[str]:
    """How many private addresses one instance with these interfaces takes, by subnet id."""
    wanted: Counter[str] = Counter()
    for nic in nics or [{}]:
        subnet = nic.get("SubnetId") or default_subnet
        if subnet and not nic.get("NetworkInterfaceId") and nic.get("InterfaceType") != "efa-only":
            wanted[subnet] += 1
    return wanted
