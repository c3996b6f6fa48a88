"""The regions of an account and the types of a region: moto lists every region and has all types everywhere.

DescribeRegions has the regions of the caller's partition that are enabled; with AllRegions or names, also the
others (EC2 API reference, "DescribeRegions"), as those of the condition `regions`. A type that a region does
not offer is unknown there: "InvalidInstanceType: The following supplied instance types do not exist:
[p5.48xlarge]", as for an invented name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from cloudddp.simulator.conditions.model import NOT_OPTED_IN
from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import client_error, override

# A type with AMD GPUs, which moto's recording leaves out (EC2 User Guide, "Amazon EC2 G4 instances").
_G4AD = {
    "GpuInfo": {
        "Gpus": [
            {"Name": "Radeon Pro V520", "Manufacturer": "AMD", "Count": 1, "MemoryInfo": {"SizeInMiB": 8192}}
        ],
        "TotalGpuMemoryInMiB": 8192,
    }
}


def install() -> None:
    """Patch moto's list of regions and its look-up of instance types, and add g4ad.xlarge."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.responses.availability_zones_and_regions import AvailabilityZonesAndRegions

    override(AvailabilityZonesAndRegions, "describe_regions", _describe)
    _add_g4ad()
    override(EC2Backend, "describe_instance_types", _in_region)


def _describe(original: Callable[..., Any], self: Any) -> Any:
    from moto.ec2.models.availability_zones_and_regions import Region
    from moto.utilities.utils import get_partition

    answer, closed = original(self), CONDITIONS.read().regions
    every = self._get_bool_param("AllRegions") or self._get_param("RegionNames")
    regions = [
        Region(one.name, one.endpoint, closed.get(one.name, one.opt_in_status))
        for one in answer.result["Regions"]
        if get_partition(one.name) == self.ec2_backend.partition
    ]
    answer.result["Regions"] = [one for one in regions if every or one.opt_in_status != NOT_OPTED_IN]
    return answer


def _add_g4ad() -> None:
    """Add g4ad.xlarge, offered where g4dn.xlarge is."""
    from moto.ec2.models import instance_types as known

    if "g4ad.xlarge" in known.INSTANCE_TYPES:
        return
    like = copy.deepcopy(known.INSTANCE_TYPES["g4dn.xlarge"])
    known.INSTANCE_TYPES["g4ad.xlarge"] = {**like, **_G4AD, "InstanceType": "g4ad.xlarge"}
    known.InstanceTypeBackend.instance_types.append(known.InstanceType("g4ad.xlarge"))
    for regions in known.INSTANCE_TYPE_OFFERINGS.values():
        for offers in regions.values():
            offers += [
                {**offer, "InstanceType": "g4ad.xlarge"}
                for offer in offers
                if offer["InstanceType"] == "g4dn.xlarge"
            ]


def _in_region(
    original: Callable[..., Any], self: Any, instance_types: Any = None, filters: Any = None
) -> Any:
    missing = [name for name in instance_types or () if not catalog.zones(self.region_name, name)]
    if missing:
        client_error(
            "InvalidInstanceType",
            f"The following supplied instance types do not exist: [{', '.join(missing)}]",
        )
    return original(self, instance_types, filters)
