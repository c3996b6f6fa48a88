"""What instances cost on demand, by the Pricing API, which moto lacks, and on the spot market.

The price list has the prices that the condition `prices` sets, in AWS's format. Without the condition it is
empty: the simulator knows no prices. DescribeSpotPriceHistory has the current price in each zone; moto's are
0.00001, of 2006.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.catalog import CONDITIONS
from cloudddp.simulator.ec2.patch import override

PUBLISHED = "2026-11-01T00:00:00Z"
_PER_VCPU = 0.05  # USD per hour: plausible, and invented


def install() -> None:
    """Patch moto's history of spot prices, and answer GetProducts where moto mocks boto3 in this process.

    In the server, api/proxy.py answers GetProducts.
    """
    from moto.core.botocore_stubber import BotocoreStubber
    from moto.ec2.responses.spot_instances import SpotInstances

    override(BotocoreStubber, "process_request", _in_process)
    override(SpotInstances, "describe_spot_price_history", _current)


def _in_process(original: Callable[..., Any], self: Any, request: Any) -> Any:
    if not str(request.url).startswith("https://api.pricing."):
        return original(self, request)
    return 200, {"Content-Type": "application/x-amz-json-1.1"}, answer(request.body or b"{}")


def answer(body: bytes | str) -> str:
    """Return the answer to a request of GetProducts, as JSON."""
    found = products(json.loads(body), CONDITIONS.read().prices)
    return json.dumps({"FormatVersion": "aws_v1", "PriceList": found})


def products(request: dict[str, Any], prices: Any) -> list[str]:
    """Return the price list for the type that a request filters by."""
    wanted = {one["Field"]: one["Value"] for one in request.get("Filters", []) if one["Type"] == "TERM_MATCH"}
    name = wanted.get("instanceType", "")
    if name not in prices:
        return []
    # A capacity block is a product of the same type, at another price.
    markets = {"OnDemand": prices[name], "CapacityBlock": prices[name] / 2}
    return [
        json.dumps(_entry({**wanted, "marketoption": market}, usd))
        for market, usd in markets.items()
        if wanted.get("marketoption", market) == market
    ]


def _entry(wanted: dict[str, str], usd: float) -> dict[str, Any]:
    """Return one product with its on-demand term (AWS Price List, "Reading a price list file")."""
    sku, offer, rate = "ABCDEFGHIJKLMNOP", "JRTCKXETXF", "6YS6EN2CT7"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd} per On Demand Linux {wanted['instanceType']} Instance Hour",
        "appliesTo": [],
        "rateCode": f"{sku}.{offer}.{rate}",
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    term = {
        "sku": sku,
        "offerTermCode": offer,
        "effectiveDate": PUBLISHED,
        "termAttributes": {},
        "priceDimensions": {f"{sku}.{offer}.{rate}": dimension},
    }
    return {
        "product": {"productFamily": "Compute Instance", "attributes": dict(wanted), "sku": sku},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.{offer}": term}},
        "version": "20261101000000",
        "publicationDate": PUBLISHED,
    }


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
