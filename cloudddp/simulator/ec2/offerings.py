"""Spot placement scores and capacity blocks for sale, which moto lacks. The data are invented, and the same
each time; a capacity block cannot be bought.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.patch import add, result

_FEE = 0.2  # USD per vCPU and hour
_STARTS = timedelta(hours=11, minutes=30)  # UTC, at which blocks start and end


def install() -> None:
    """Add the actions to moto's EC2."""
    from moto.ec2.responses import EC2Response

    add(EC2Response, get_spot_placement_scores=_scores, describe_capacity_block_offerings=_blocks)


def _scores(response: Any) -> Any:
    """Answer with 3 of 10 in each zone, as AWS does for a single type."""
    backend, (name,) = response.ec2_backend, response._get_param("InstanceTypes")
    zones = catalog.zones(backend.region_name, name)
    found = [zone for zone in backend.describe_availability_zones() if zone.name in zones]
    return result(SpotPlacementScores=[{"AvailabilityZoneId": one.zone_id, "Score": 3} for one in found])


def _blocks(response: Any) -> Any:
    """Answer with a block in each zone, which begin tomorrow, the day after, and so on."""
    name = response._get_param("InstanceType")
    count = response._get_int_param("InstanceCount")
    hours = response._get_int_param("CapacityDurationHours")
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + _STARTS
    found = [
        {
            "CapacityBlockOfferingId": f"cb-{days:017x}",
            "InstanceType": name,
            "AvailabilityZone": zone,
            "InstanceCount": count,
            "StartDate": start + timedelta(days=days),
            "EndDate": start + timedelta(days=days, hours=hours),
            "CapacityBlockDurationHours": hours,
            "UpfrontFee": f"{catalog.vcpus(name) * _FEE * count * hours:.2f}",
            "CurrencyCode": "USD",
        }
        for days, zone in enumerate(catalog.zones(response.ec2_backend.region_name, name), start=1)
    ]
    return result(CapacityBlockOfferings=found)
