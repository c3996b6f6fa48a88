"""DescribeSpotPriceHistory: the current price in each zone. moto's prices are 0.00001, of 2006."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.ec2 import catalog
from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.ec2.patch import override

_PER_VCPU = 0.05  # USD per hour: plausible, and invented


def install() -> None:
    """Patch moto's response."""
    from moto.ec2.responses.spot_instances import SpotInstances

    override(SpotInstances, "describe_spot_price_history", _current)


def _current(original: Callable[..., Any], self: Any) -> Any:
    answer = original(self)
    for one in answer.result["SpotPriceHistory"]:
        one["SpotPrice"] = f"{_price(one['InstanceType'], one['AvailabilityZone']):.6f}"
        one["Timestamp"] = datetime.now(UTC)
        one["ProductDescription"] = "Linux/UNIX"
    return answer


def _price(instance_type: str, zone: str) -> float:
    """Return the price that a condition sets, or one that depends on type and zone."""
    found = CONDITIONS.read().spot_prices.get(zone, {}).get(instance_type)
    return (
        catalog.vcpus(instance_type) * _PER_VCPU * (1 + (ord(zone[-1]) - ord("a")) / 10)
        if found is None
        else found
    )
