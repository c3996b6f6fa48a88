"""Writes cloudddp/cluster/price_table.json: USD per hour on demand, Linux, of the GPU types in every
commercial region.

    python infra/prices/generate.py --api                     asks the Pricing API (needs pricing:GetProducts)
    python infra/prices/generate.py --answers DIR reads its answers, as `aws pricing get-products` prints them
    python infra/prices/generate.py --vantage FILE --karpenter FILE
                                                              reads tables that others have made of them

Each price comes from the newest source that has it; a region names its sources, and the date of the oldest.
Where two sources have the same price, they are compared, and differences are printed. Regions outside the
partition `aws`, Local Zones and Wavelength Zones are left out: cloudddp has never been used there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "cloudddp" / "cluster" / "price_table.json"
# NVIDIA GPUs that a Linux instance uses whole. Left out: fractions of a GPU (g6f, gr6f), ARM with graphics
# GPUs (g5g), AMD (g4ad), Trainium and Inferentia, which cloudddp does not support, types of a GPU rack (p6e),
# and types before G4 and P3.
FAMILY = re.compile(r"(g4dn|g[5-9]e?|gr[6-9]|p3|p3dn|p4de?|p5(en?)?|p6-b[23]00)\.")
REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(central|east|north|northeast|south|southeast|west)-\d")
# EBS gp3, USD per GiB and month, as https://aws.amazon.com/ebs/pricing/ listed it in July 2021. The largest
# of them is the upper bound for regions that are newer.
GP3_DATE = "2021-07-14"
GP3 = {
    "af-south-1": 0.1047,
    "ap-east-1": 0.1056,
    "ap-northeast-1": 0.096,
    "ap-northeast-2": 0.0912,
    "ap-northeast-3": 0.096,
    "ap-south-1": 0.0912,
    "ap-southeast-1": 0.096,
    "ap-southeast-2": 0.096,
    "ca-central-1": 0.088,
    "eu-central-1": 0.0952,
    "eu-north-1": 0.0836,
    "eu-south-1": 0.0924,
    "eu-west-1": 0.088,
    "eu-west-2": 0.0928,
    "eu-west-3": 0.0928,
    "me-south-1": 0.0968,
    "sa-east-1": 0.152,
    "us-east-1": 0.08,
    "us-east-2": 0.08,
    "us-west-1": 0.096,
    "us-west-2": 0.08,
}


@dataclass(frozen=True)
class Source:
    """One source of prices: region -> instance type -> USD per hour."""

    name: str
    date: str
    prices: dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--api", action="store_true", help="ask the Pricing API")
    parser.add_argument(
        "--answers", type=Path, metavar="DIR", help="folder with answers of GetProducts as JSON files"
    )
    parser.add_argument(
        "--vantage", type=Path, metavar="FILE", help="JavaScript table made of instances.vantage.sh"
    )
    parser.add_argument(
        "--karpenter", type=Path, metavar="FILE", help="karpenter's zz_generated.pricing_aws.go"
    )
    parser.add_argument("--output", type=Path, default=TABLE, metavar="FILE")
    given = parser.parse_args()
    sources = []
    if given.api:
        sources.append(from_answers(ask()))
    if given.answers:
        sources.append(from_answers(json.loads(p.read_text()) for p in sorted(given.answers.glob("*.json"))))
    if given.vantage:
        sources.append(from_vantage(given.vantage.read_text()))
    if given.karpenter:
        sources.append(from_karpenter(given.karpenter.read_text()))
    if not sources:
        parser.error("give at least one source")
    for line in differences(sources):
        print(line, file=sys.stderr)
    given.output.write_text(rendered(table(sources)))


# -- sources -------------------------------------------------------------------------------------------------


def ask() -> Iterator[dict[str, Any]]:
    """Yield the pages of GetProducts for on-demand Linux instances of every region."""
    import boto3

    def equals(field: str, value: str) -> dict[str, str]:
        return {"Type": "TERM_MATCH", "Field": field, "Value": value}

    filters = [
        equals("operatingSystem", "Linux"),
        equals("tenancy", "Shared"),
        equals("preInstalledSw", "NA"),
        equals("capacitystatus", "Used"),
        equals("locationType", "AWS Region"),
    ]
    pages = boto3.client("pricing", region_name="us-east-1").get_paginator("get_products")
    yield from pages.paginate(ServiceCode="AmazonEC2", Filters=filters)


def from_answers(answers: Iterable[dict[str, Any]]) -> Source:
    """Return the prices in answers of GetProducts, whose PriceList holds JSON texts."""
    prices: dict[str, dict[str, float]] = {}
    dates = []
    for text in (text for answer in answers for text in answer["PriceList"]):
        entry = json.loads(text) if isinstance(text, str) else text
        attributes = entry["product"]["attributes"]
        name, region = attributes.get("instanceType", ""), attributes.get("regionCode", "")
        if not (FAMILY.match(name) and REGION.fullmatch(region)):
            continue
        for term in entry["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if dimension["unit"] == "Hrs" and usd > 0:
                    prices.setdefault(region, {})[name] = usd
                    dates.append(str(entry.get("publicationDate", ""))[:10])
    return Source("AWS Pricing API", max(dates, default=""), prices)


def from_vantage(text: str) -> Source:
    """Return the prices in a JavaScript list of types with `pricing` by region."""
    listed, _ = json.JSONDecoder().raw_decode(text[text.index("[") :])
    prices: dict[str, dict[str, float]] = {}
    for entry in listed:
        for region, found in entry["pricing"].items():
            if REGION.fullmatch(region) and found.get("onDemand") and FAMILY.match(entry.get("apiName", "")):
                prices.setdefault(region, {})[entry["apiName"]] = float(found["onDemand"])
    (date,) = re.findall(r"Last updated: (\d{4}-\d\d-\d\d)", text)[:1]
    return Source("instances.vantage.sh", date, prices)


def from_karpenter(text: str) -> Source:
    """Return the prices in karpenter's Go source, which has one region."""
    (date, region) = re.findall(r"generated at (\d{4}-\d\d-\d\d)T\S+ for (\S+)", text)[0]
    found = {m[1]: float(m[2]) for m in re.finditer(r'"([a-z0-9-]+\.[a-z0-9-]+)": ([0-9.]+)', text)}
    return Source(
        "karpenter-provider-aws", date, {region: {n: p for n, p in found.items() if FAMILY.match(n)}}
    )


# -- the table -----------------------------------------------------------------------------------------------


def differences(sources: list[Source]) -> Iterator[str]:
    """Yield a line per price in which two sources differ by more than rounding."""
    for index, one in enumerate(sources):
        for other in sources[index + 1 :]:
            common = [(r, n) for r in one.prices for n in one.prices[r] if n in other.prices.get(r, {})]
            found = [(r, n) for r, n in common if abs(one.prices[r][n] - other.prices[r][n]) > 0.001]
            yield f"{one.name} and {other.name}: {len(common)} prices in common, {len(found)} differ"
            yield from (f"  {r} {n}: {one.prices[r][n]} and {other.prices[r][n]}" for r, n in found)


def table(sources: list[Source]) -> dict[str, Any]:
    """Return the table: each price from its newest source. A region's date is that of its oldest price."""
    regions: dict[str, Any] = {}
    for source in sorted(sources, key=lambda one: one.date, reverse=True):
        for region, prices in source.prices.items():
            newer = regions.get(region, {"sources": {}, "types": {}})
            added = {name: usd for name, usd in prices.items() if name not in newer["types"]}
            if added:
                sources_of = {**newer["sources"], source.name: source.date}
                regions[region] = {
                    "sources": sources_of,
                    "date": min(sources_of.values()),
                    "gp3": GP3.get(region, max(GP3.values())),
                    "types": dict(sorted({**newer["types"], **added}.items())),
                }
    return {"gp3_date": GP3_DATE, "regions": dict(sorted(regions.items()))}


def rendered(content: dict[str, Any]) -> str:
    """Return the table as JSON with a line per region, so that a change shows as one."""
    head = {key: value for key, value in content.items() if key != "regions"}
    lines = [f"  {json.dumps(region)}: {json.dumps(entry)}" for region, entry in content["regions"].items()]
    return json.dumps(head)[:-1] + ', "regions": {\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    main()
