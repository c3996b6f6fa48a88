"""Spot placement scores and capacity blocks for sale, which moto lacks. The data are invented, and the same
for the same zone and type; a capacity block cannot be bought.
"""

from __future__ import annotations

import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import add, client_error, invalid_value, result

_MOST = 64  # instances of a block
_FEE = 0.2  # USD per vCPU and hour
_STARTS = timedelta(hours=11, minutes=30)  # UTC, at which blocks start and end


def install() -> None:
    """Add the actions to moto's EC2."""
    from moto.ec2.responses import EC2Response

    add(EC2Response, get_spot_placement_scores=_scores, describe_capacity_block_offerings=_blocks)


def _scores(response: Any) -> Any:
    response.error_on_dryrun()
    backend, count = response.ec2_backend, response._get_int_param("TargetCapacity")
    ids = {zone.name: zone.zone_id for zone in backend.describe_availability_zones()}
    best: dict[str, int] = {}
    for name in response._get_param("InstanceTypes", []):
        for zone in catalog.zones(backend.region_name, name):
            left = CONDITIONS.spot_capacity(zone, name)
            low = 2 + zlib.crc32(f"{zone}{name}".encode()) % 3  # as AWS's are for a single type
            best[zone] = max(best.get(zone, 1), 1 if left is not None and left < count else low)
    scores = [
        {"Region": backend.region_name, "AvailabilityZoneId": ids[zone], "Score": score}
        for zone, score in sorted(best.items())
    ]
    return result(SpotPlacementScores=scores)


def _blocks(response: Any) -> Any:
    response.error_on_dryrun()
    here, name = response.ec2_backend.region_name, response._get_param("InstanceType")
    count = response._get_int_param("InstanceCount") or 1
    hours = response._get_int_param("CapacityDurationHours") or 0
    days, rest = divmod(hours, 24)
    if rest or not (1 <= days <= 14 or (14 < days <= 182 and days % 7 == 0)):
        invalid_value(f"Value ({hours}) for parameter CapacityDurationHours is invalid.")
    if not 1 <= count <= _MOST:
        invalid_value(f"Value ({count}) for parameter InstanceCount is invalid.")
    if not catalog.has_blocks(name):
        client_error("Unsupported", f"The instance type '{name}' is not supported for Capacity Blocks.")
    zones = enumerate(catalog.zones(here, name), start=1)
    return result(CapacityBlockOfferings=[_block(zone, name, count, hours, at) for at, zone in zones])


def _block(zone: str, name: str, count: int, hours: int, at: int) -> dict[str, Any]:
    """Return the block that begins in so many days; a later one costs more."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start = today + timedelta(days=at) + _STARTS
    return {
        "CapacityBlockOfferingId": f"cb-{zlib.crc32(f'{zone}{name}{start}{count}{hours}'.encode()):017x}",
        "InstanceType": name,
        "AvailabilityZone": zone,
        "InstanceCount": count,
        "StartDate": start,
        "EndDate": start + timedelta(hours=hours),
        "CapacityBlockDurationHours": hours,
        "UpfrontFee": f"{catalog.vcpus(name) * _FEE * count * hours * (1 + at / 50):.2f}",
        "CurrencyCode": "USD",
    }
