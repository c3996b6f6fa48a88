"""Prices that AWS returns: the on-demand price of the Pricing API, and current spot prices. Read-only.

Both are a service to the user: an account that may not ask, or an answer that cannot be read, is no error.
`None` then means that the table of cluster/prices.py counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime

import msgspec

from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError

_HIGHEST = 1e4  # USD an hour: no instance costs more, so that a higher price is an error


class _Dimension(msgspec.Struct, rename={"per_unit": "pricePerUnit"}):
    unit: str
    per_unit: dict[str, str]


class _Term(msgspec.Struct, rename={"dimensions": "priceDimensions"}):
    dimensions: dict[str, _Dimension]


class _Terms(msgspec.Struct, rename={"on_demand": "OnDemand"}):
    on_demand: dict[str, _Term] = {}


class _Entry(msgspec.Struct, rename={"published": "publicationDate"}):
    """One item of a PriceList, which is JSON text in the JSON answer (AWS Price List API, "GetProducts")."""

    terms: _Terms
    published: str = ""


def on_demand(aws: AWS, instance_type: str) -> tuple[float, str] | None:
    """Return (USD per hour for Linux, date of the price list), or None if AWS does not tell one price. One
    call."""
    if aws.partition != "aws":  # other partitions have lists, and currencies, of their own
        return None
    wanted = {
        "instanceType": instance_type,
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        answer = aws.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)
        entries = [msgspec.json.decode(text, type=_Entry) for text in answer.get("PriceList", [])]
        found = {(price, _day(entry.published)) for entry in entries for price in _prices(entry)}
    except (CloudDDPError, msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None
    return found.pop() if len(found) == 1 else None


def _day(published: str) -> str:
    """Return the date of a time such as 2026-11-20T08:15:30Z. Raises ValueError."""
    return date.fromisoformat(published[:10]).isoformat() if published else ""


def _prices(entry: _Entry) -> list[float]:
    dimensions = [one for term in entry.terms.on_demand.values() for one in term.dimensions.values()]
    prices = [float(one.per_unit.get("USD", "0")) for one in dimensions if one.unit == "Hrs"]
    return [price for price in prices if 0 < price <= _HIGHEST]


def spot(aws: AWS, instance_type: str, zones: Sequence[str]) -> tuple[float, float] | None:
    """Return the lowest and the highest current spot price of these zones, USD per hour. One call."""
    try:
        answer = aws.call(
            "ec2",
            "describe_spot_price_history",
            InstanceTypes=[instance_type],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),  # the answer then has the price of each zone that is valid now
        )
        listed = answer.get("SpotPriceHistory", [])
        prices = [float(one["SpotPrice"]) for one in listed if one.get("AvailabilityZone") in zones]
    except (CloudDDPError, ValueError, KeyError, TypeError):
        return None
    prices = [price for price in prices if 0 < price <= _HIGHEST]
    return (min(prices), max(prices)) if prices else None
