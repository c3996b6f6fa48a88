"""What the instance types are and where they are offered, read from moto's snapshot of DescribeInstanceTypes.

Pure look-ups; no instance is known here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# The quota an instance type counts against, by the letters its family begins with (AWS's "instance buckets").
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
_P5 = ("p5", "p6")  # a spot quota of their own


def gpus(instance_type: str) -> list[tuple[str, int]]:
    """Model and memory (MiB) of each GPU of an instance type; empty where it has none, or part of one."""
    listed = _type(instance_type).get("GpuInfo", {}).get("Gpus", [])
    return [
        (f"{gpu['Manufacturer']} {gpu['Name']}", int(gpu.get("MemoryInfo", {}).get("SizeInMiB", 0)))
        for gpu in listed
        for _ in range(gpu.get("Count", 0))
    ]


def vcpus(instance_type: str) -> int:
    """The type's vCPUs, in which EC2 counts quotas; 0 for an unknown type."""
    return int(_type(instance_type).get("VCpuInfo", {}).get("DefaultVCpus", 0))


def quota(instance_type: str, *, spot: bool) -> str:
    """The quota that an instance of the type counts against; see conditions.QUOTAS."""
    family = instance_type.partition(".")[0]
    letters = family[: next((at for at, letter in enumerate(family) if letter.isdigit()), len(family))]
    kind = _FAMILIES.get(letters, "standard" if letters[:1] in _STANDARD else "other")
    if spot and kind == "p" and family.startswith(_P5):
        kind = "p5"
    return f"{'spot' if spot else 'on-demand'}-{kind}"


def network(instance_type: str) -> dict[str, Any]:
    """NetworkInfo of the type, as DescribeInstanceTypes shows it; empty for an unknown type."""
    return dict(_type(instance_type).get("NetworkInfo", {}))


def strategies(instance_type: str) -> list[str]:
    """The placement strategies the type supports."""
    return list(_type(instance_type).get("PlacementGroupInfo", {}).get("SupportedStrategies", []))


@lru_cache(maxsize=1024)
def zones(region: str, instance_type: str) -> tuple[str, ...]:
    """The zones of a region that offer the type, in order."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return tuple(sorted({o["Location"] for o in offers if o["InstanceType"] == instance_type}))


def types() -> frozenset[str]:
    """Every instance type that is known."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return frozenset(INSTANCE_TYPES)


def all_zones() -> frozenset[str]:
    """Every zone of every region."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    return frozenset(zone.name for zones in RegionsAndZonesBackend.zones.values() for zone in zones)


def actions() -> frozenset[str]:
    """The actions of the services that cloudddp calls."""
    from moto.core.utils import get_service_model

    return frozenset(
        str(name) for service in ("ec2", "ssm", "sts") for name in get_service_model(service).operation_names
    )


def _type(instance_type: str) -> dict[str, Any]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return dict(INSTANCE_TYPES.get(instance_type, {}))
