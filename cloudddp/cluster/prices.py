"""EC2 prices in USD: a dated table of on-demand prices, and the cost of a cluster per hour. Makes no call.

A price is looked up, or given by the user; it is never guessed and never 0. Spot capacity counts at the
on-demand price, which is an upper bound: a spot price may rise while the nodes run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec

# Written by infra/prices/generate.py.
TABLE = Path(__file__).with_name("price_table.json")
PUBLIC_IPV4_HOUR = 0.005
HOURS_A_MONTH = 730
FREE_THROUGHPUT = 125  # MiB/s of a gp3 volume that its GiB include
# USD per MiB/s and month of more throughput, in parts of the price of a GiB: 0.04 to 0.08 in us-east-1, and
# alike elsewhere.
THROUGHPUT_FACTOR = 0.51
FREE_IOPS = 3000  # of a gp3 volume that its GiB include
# USD per IOPS and month beyond them, in parts of the price of a GiB: 0.005 to 0.08 in us-east-1 (Amazon EBS
# pricing).
IOPS_FACTOR = 0.0625


class _Region(msgspec.Struct, frozen=True):
    date: str  # of its oldest price
    gp3: float  # USD per GiB and month; the largest of all regions where it is not known
    types: dict[str, float]


class _Table(msgspec.Struct, frozen=True):
    regions: dict[str, _Region]


@dataclass(frozen=True, slots=True)
class Listed:
    """The on-demand price of one node in USD per hour, as a list shows it, and where it comes from."""

    usd: float
    source: str


@dataclass(frozen=True, slots=True)
class Price:
    """What a cluster costs while it exists."""

    node_hour: float  # USD, one node
    nodes: int
    disk_gb: int
    source: str  # for people: where node_hour comes from
    gp3_month: float = 0.08  # USD per GiB
    throughput: int = FREE_THROUGHPUT  # MiB/s of each disk
    addresses: int = 1  # public IPv4 addresses of each node
    # Current spot prices of one node: the lowest and the highest of all zones.
    spot: tuple[float, float] | None = None

    @property
    def extras_hour(self) -> float:
        """USD per hour for disks and public addresses; traffic is not included."""
        more = (self.throughput - FREE_THROUGHPUT) * THROUGHPUT_FACTOR
        more += (iops_of(self.throughput) - FREE_IOPS) * IOPS_FACTOR
        disk = (self.disk_gb + more) * self.gp3_month / HOURS_A_MONTH
        return self.nodes * (disk + self.addresses * PUBLIC_IPV4_HOUR)

    @property
    def hour(self) -> float:
        """USD per hour for the whole cluster."""
        return self.nodes * self.node_hour + self.extras_hour


def iops_of(throughput: int) -> int:
    """Return the IOPS that a gp3 volume needs for a throughput in MiB/s: at most 0.25 MiB/s for each (EBS
    User Guide)."""
    return max(FREE_IOPS, 4 * throughput)


def billed_hours(seconds: float) -> float:
    """Return the hours that EC2 bills for a node: per second, with a minimum of 60 seconds."""
    return max(seconds, 60.0) / 3600


def listed(instance_type: str, region: str) -> Listed | None:
    """Return the price of one node in the table; None if it is not there."""
    found = _table().regions.get(region)
    usd = found.types.get(instance_type) if found else None
    return Listed(usd, f"on-demand list price of {found.date}") if found and usd else None


def gp3_month(region: str) -> float:
    """Return the price of EBS gp3 storage, USD per GiB and month; the highest of all regions for one that is
    unknown."""
    regions = _table().regions
    return regions[region].gp3 if region in regions else max(one.gp3 for one in regions.values())


@functools.cache
def _table() -> _Table:
    return msgspec.json.decode(TABLE.read_bytes(), type=_Table)
