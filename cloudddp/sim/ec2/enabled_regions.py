"""DescribeRegions: the regions of the caller's partition that are enabled. moto lists every region that it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudddp.sim.ec2.patch import override


def install() -> None:
    """Patch moto's list."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    override(RegionsAndZonesBackend, "describe_regions", _enabled)


def _enabled(original: Callable[..., Any], self: Any, region_names: list[str] | None = None) -> Any:
    from moto.utilities.utils import get_partition

    return [
        one
        for one in original(self, region_names)
        if get_partition(one.name) == self.partition and one.opt_in_status != "not-opted-in"
    ]
