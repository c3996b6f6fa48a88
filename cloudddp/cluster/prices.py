"""EC2 prices in USD: a dated table of on-demand prices, the cost of a cluster per hour, and what it has cost
so far. Makes no call.

A price is looked up, or given by the user; it is never guessed and never 0. Spot capacity counts at the
on-demand price, which is an upper bound: a spot price may rise while the nodes run.

The cost so far is computed from the instances that AWS lists, ended ones included, and never falls: a lost
node was billed until it ended. EC2 gives the time for most ends (StateTransitionReason) and forgets an ended
instance after about an hour. If the time is not known, the node counts until now, which is an upper bound,
and the cost is marked as one. So is the cost of spot instances, which count at the on-demand price.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from cloudddp.aws.inventory import Instance
from cloudddp.tags import most_common

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
class ListPrice:
    """The on-demand price of one node in USD per hour, as a list shows it, and where it comes from."""

    usd: float
    source: str
    published: str = ""  # the date of the list, where there is one


@dataclass(frozen=True, slots=True)
class Price:
    """What a cluster costs while it exists."""

    node_hour: float  # USD, one node
    nodes: int
    disk_gb: int
    source: str  # for people: where node_hour comes from
    published: str = ""  # the date of that list, where there is one
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
    """Return the IOPS that a gp3 volume needs: at most 0.25 MiB/s for each (EBS User Guide)."""
    return max(FREE_IOPS, 4 * throughput)


def billed_hours(seconds: float) -> float:
    """Return the hours that EC2 bills for a node: per second, with a minimum of 60 seconds."""
    return max(seconds, 60.0) / 3600


def listed(instance_type: str, region: str) -> ListPrice | None:
    """Return the price of one node in the table; None if it is not there."""
    found = _regions().get(region)
    usd = found.types.get(instance_type) if found else None
    return ListPrice(usd, f"on-demand list price of {found.date}", found.date) if found and usd else None


def gp3_month(region: str) -> float:
    """Return the price of EBS gp3, USD per GiB and month; the highest of all for an unknown region."""
    regions = _regions()
    return regions[region].gp3 if region in regions else max(one.gp3 for one in regions.values())


@functools.cache
def _regions() -> dict[str, _Region]:
    return msgspec.json.decode(TABLE.read_bytes(), type=_Table).regions


POWER_OFF = timedelta(minutes=5)  # cloudddp-deadline.service needs at most 150 s, then the node shuts down
_ROUNDING = timedelta(seconds=1)  # EC2 gives the end of an instance in whole seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """USD at the on-demand price, or None if it is unknown. `at_most`: part of it is an upper bound."""

    usd: float | None
    at_most: bool = False


def cost_so_far(members: Sequence[Instance], now: datetime) -> Cost:
    """Return the cost of one cluster. `members` are all of its instances that AWS lists, live and ended.
    Price and number of nodes are the most common values of its tags: one changed tag changes nothing."""
    price = most_common(member.tags.price for member in members)
    begun = [_start(member, members) for member in members]
    first = min(filter(None, begun), default=None)
    if price is None or first is None:
        return Cost(None)
    hours, at_most = 0.0, any(member.spot for member in members)
    for member, start in zip(members, (one or first for one in begun), strict=True):
        end = now if member.ended is None else min(member.ended + _ROUNDING, now)
        if member.ended is None and not member.live and member.tags.expires is not None:
            end = max(start, min(end, member.tags.expires + POWER_OFF))  # which ends a node that runs
        at_most = at_most or (member.ended is None and member.state not in ("pending", "running"))
        hours += billed_hours((end - start).total_seconds())
    forgotten = max((most_common(member.tags.nodes for member in members) or 0) - len(members), 0)
    hours += forgotten * billed_hours((now - first).total_seconds())
    return Cost(price * hours, at_most or forgotten > 0)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """Return the sum for several clusters; unknown if one of them is."""
    everything = list(costs)
    if any(cost.usd is None for cost in everything):
        return Cost(None)
    return Cost(sum(cost.usd or 0.0 for cost in everything), any(cost.at_most for cost in everything))


def _start(member: Instance, members: Sequence[Instance]) -> datetime | None:
    """The start of billing: the time in the node's tag, which survives a stop and start, else EC2's launch
    time. The tag of a node that replaces another one has the time of `up`: once AWS has forgotten the other
    one, it counts for both."""
    others = [one.tags.node_rank for one in members if one is not member and not one.live]
    if member.tags.node_rank is not None and member.tags.node_rank in others:
        return member.launched or member.tags.created
    return member.tags.created or member.launched
