"""What a cluster has cost so far, computed from the instances that AWS lists, ended ones included. Pure.

The cost never falls: a lost node was billed until it ended. EC2 gives the time for most ends
(StateTransitionReason) and forgets an ended instance after about an hour. If the time is not known, the node
counts until now, which is an upper bound, and the cost is marked as one. So is the cost of spot instances,
which count at the on-demand price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cloudddp.aws.inventory import Instance
from cloudddp.cluster import prices
from cloudddp.tags import most_common

_ROUNDING = timedelta(seconds=1)  # EC2 gives the end of an instance in whole seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """USD at the on-demand price, or None if it is unknown. `at_most`: part of it is an upper bound."""

    usd: float | None
    at_most: bool = False


def so_far(members: Sequence[Instance], now: datetime) -> Cost:
    """Return the cost of one cluster. `members` are all of its instances that AWS lists, live and ended.

    Price and number of nodes are the most common values of its tags, so that one changed tag does not change
    the cost.
    """
    price = most_common(member.tags.price for member in members)
    starts = [start for member in members if (start := _start(member)) is not None]
    if price is None or not starts:
        return Cost(None)
    seconds, at_most = 0.0, any(member.spot for member in members)
    for member in members:
        start = _start(member) or min(starts)
        end = now if member.ended is None else min(member.ended + _ROUNDING, now)
        at_most = at_most or (member.ended is None and member.state not in ("pending", "running"))
        seconds += _billed_seconds(start, end)
    forgotten = max((most_common(member.tags.nodes for member in members) or 0) - len(members), 0)
    seconds += forgotten * _billed_seconds(min(starts), now)
    return Cost(price * seconds / 3600, at_most or forgotten > 0)


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum for several clusters; unknown if one of them is."""
    everything = list(costs)
    if any(cost.usd is None for cost in everything):
        return Cost(None)
    return Cost(sum(cost.usd or 0.0 for cost in everything), any(cost.at_most for cost in everything))


def _start(member: Instance) -> datetime | None:
    """The start of billing: the time in the node's tag, which survives a stop and start, else EC2's launch
    time."""
    return member.tags.created or member.launched


def _billed_seconds(start: datetime, end: datetime) -> float:
    return prices.billed_hours((end - start).total_seconds()) * 3600
