"""What this region of EC2 offers: instance types and their zones, from moto's snapshot of
DescribeInstanceTypes, and the conditions of this process, which may refer to them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cloudddp.simulator.conditions.reading import Names
from cloudddp.simulator.conditions.store import Store

ACCOUNT = "123456789012"  # moto's default

# The quota that an instance type counts against, by the letters of its family.
_FAMILIES = {
    "g": "g",
    "gr": "g",
    "vt": "g",
    "p": "p",
    "trn": "other",
    "inf": "other",
    "dl": "other",
    "hpc": "other",
}
_STANDARD = "acdhimrtz"
_P5 = ("p5", "p6")  # have a spot quota of their own


def gpus(instance_type: str) -> list[tuple[str, int]]:
    """Return model and memory (MiB) of each GPU of an instance type; empty if it has none, or a fraction of
    one."""
    listed = _type(instance_type).get("GpuInfo", {}).get("Gpus", [])
    return [
        (f"{gpu['Manufacturer']} {gpu['Name']}", int(gpu.get("MemoryInfo", {}).get("SizeInMiB", 0)))
        for gpu in listed
        for _ in range(gpu.get("Count", 0))
    ]


def vcpus(instance_type: str) -> int:
    """Return the type's vCPUs, the unit of EC2's quotas; 0 for an unknown type."""
    return int(_type(instance_type).get("VCpuInfo", {}).get("DefaultVCpus", 0))


def quota(instance_type: str, *, spot: bool) -> str:
    """Return the quota that an instance of the type counts against; see conditions.model.QUOTAS."""
    family = instance_type.partition(".")[0]
    letters = family[: next((at for at, letter in enumerate(family) if letter.isdigit()), len(family))]
    kind = _FAMILIES.get(letters, "standard" if letters[:1] in _STANDARD else "other")
    if spot and kind == "p" and family.startswith(_P5):
        kind = "p5"
    return f"{'spot' if spot else 'on-demand'}-{kind}"


def network(instance_type: str) -> dict[str, Any]:
    """Return the type's NetworkInfo of DescribeInstanceTypes; empty for an unknown type."""
    return dict(_type(instance_type).get("NetworkInfo", {}))


def strategies(instance_type: str) -> list[str]:
    """Return the placement strategies that the type supports."""
    return list(_type(instance_type).get("PlacementGroupInfo", {}).get("SupportedStrategies", []))


@lru_cache(maxsize=1024)
def zones(region: str, instance_type: str) -> tuple[str, ...]:
    """Return the zones of a region that offer the type, in order."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return tuple(sorted({o["Location"] for o in offers if o["InstanceType"] == instance_type}))


def types() -> frozenset[str]:
    """Return all instance types."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return frozenset(INSTANCE_TYPES)


def _names() -> Names:
    """Return the zones of all regions, all types, the actions of the services that conditions can refer to,
    and the subnets and VPCs that exist."""
    from moto.core.utils import get_service_model
    from moto.ec2.models import ec2_backends
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    actions = {
        str(name)
        for service in ("ec2", "ssm", "sts", "service-quotas", "pricing")
        for name in get_service_model(service).operation_names
    }
    backends = [backend for account in list(ec2_backends.values()) for backend in list(account.values())]
    subnets = {
        subnet
        for backend in backends
        for by_zone in list(backend.subnets.values())
        for subnet in list(by_zone)
    }
    return Names(
        zones=frozenset(zone.name for zones in RegionsAndZonesBackend.zones.values() for zone in zones),
        types=types(),
        actions=frozenset(actions),
        subnets=frozenset(subnets),
        regions=frozenset(RegionsAndZonesBackend.zones),
        vpcs=frozenset(vpc for backend in backends for vpc in list(backend.vpcs)),
    )


CONDITIONS = Store(_names)


def _type(instance_type: str) -> dict[str, Any]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return dict(INSTANCE_TYPES.get(instance_type, {}))
