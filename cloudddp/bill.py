"""What a cluster has cost so far, from what AWS shows of its instances, those that have ended included. Pure.

The sum only rises: a node that was lost was paid for until it ended. EC2 says when (StateTransitionReason) for most
ends, and forgets an ended instance after about an hour. Where the moment is not known, the node is counted until
now, which is the most that it can have cost, and the sum says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from cloudddp import prices
from cloudddp.aws.inventory import Instance

T = TypeVar("T")
_ROUNDING = timedelta(seconds=1)  # EC2 names the second in which an instance ended


@dataclass(frozen=True, slots=True)
class Bill:
    """A sum in USD at the on-demand price; None where it is unknown. `at_most`: part of it is an upper bound."""

    usd: float | None
    at_most: bool = False


def so_far(members: Sequence[Instance], now: datetime) -> Bill:
    """Return the sum for one cluster. `members` are all of its instances that AWS shows, live and ended.

    Price and number of nodes are what most of its tags say, so that one changed tag does not change the bill.
    """
    price = usual(member.tags.price for member in members)
    starts = [start for member in members if (start := _start(member)) is not None]
    if price is None or not starts:
        return Bill(None)
    seconds, at_most = 0.0, False
    for member in members:
        start = _start(member) or min(starts)
        end = now if member.ended is None else min(member.ended + _ROUNDING, now)
        at_most = at_most or (member.ended is None and member.state not in ("pending", "running"))
        seconds += _billed(start, end)
    forgotten = max((usual(member.tags.nodes for member in members) or 0) - len(members), 0)
    seconds += forgotten * _billed(min(starts), now)
    return Bill(price * seconds / 3600, at_most or forgotten > 0)


def total(bills: Iterable[Bill]) -> Bill:
    """Return the sum of several clusters' bills; unknown where one of them is."""
    everything = list(bills)
    if any(bill.usd is None for bill in everything):
        return Bill(None)
    return Bill(sum(bill.usd or 0.0 for bill in everything), any(bill.at_most for bill in everything))


def _start(member: Instance) -> datetime | None:
    """The moment from which the node is counted: its tag's, which survives a stop and start, else AWS's own."""
    return member.tags.created or member.launched


def _billed(start: datetime, end: datetime) -> float:
    return prices.billed_hours((end - start).total_seconds()) * 3600


def usual(values: Iterable[T | None]) -> T | None:
    """Return the most common of the values that are known: one changed tag of one node does not decide."""
    found = Counter(value for value in values if value is not None)
    return found.most_common(1)[0][0] if found else None
