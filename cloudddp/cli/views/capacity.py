"""What AWS has and sells of instance types, as text and as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from cloudddp.cluster.survey import Place
from cloudddp.formats import dollars, table
from cloudddp.tags import iso

_WIDTH = 76  # of a line of a command that continues on the next one


def place(found: Place) -> str:
    """Return what one region has of one type, with the command that buys the first capacity block."""
    lines = [f"{found.type} in {found.region}"]
    if found.info is not None:
        price = found.price
        usual = f"{dollars(price.usd)} per node-hour ({price.source})" if price else "unknown"
        lines.append(f"on demand  {usual}")
        for market, quota in found.quotas.items():
            used = f"{quota.needed} vCPUs needed, {quota.used} of {quota.limit} in use"
            lines.append(f"quota      {market}: {used}{'' if quota.suffices else ': too few'}")
        zones = [
            (
                zone,
                dollars(found.spot.get(zone)) if zone in found.spot else "-",
                str(found.scores.get(zone, "-")),
            )
            for zone in found.zones
        ]
        lines += table(("ZONE", "SPOT/H", "SPOT SCORE (OF 10, LOW FOR A SINGLE TYPE)"), zones).split("\n")
        lines += _blocks(found)
    lines += [f"{kind}: {error.message}" for kind, error in found.problems.items()]
    return "\n  ".join(lines)


def _blocks(found: Place) -> list[str]:
    if found.info and not found.info.blocks:
        return ["AWS sells no capacity blocks of this type"]
    if not found.blocks:
        return [] if "blocks" in found.problems else ["no capacity block of this length is for sale"]
    rows = [
        (
            one.capacity_block_offering_id,
            one.availability_zone,
            f"{one.start_date:%Y-%m-%d %H:%M}",
            f"{one.usd:,.2f}",
            f"{one.usd_per_hour:.2f}",
        )
        for one in found.blocks
    ]
    command = textwrap.wrap(found.blocks[0].purchase(found.region), _WIDTH - 6, break_on_hyphens=False)
    return [
        *table(("CAPACITY BLOCK", "ZONE", "START (UTC)", "USD", "NODE/H"), rows).split("\n"),
        "To buy the first one (AWS charges it at once, and it cannot be cancelled):",
        "  " + " \\\n      ".join(command),
    ]


def record(found: Place, nodes: int) -> dict[str, Any]:
    """Return the JSON document of a place."""
    return {
        "region": found.region,
        "type": found.type,
        "nodes": nodes,
        "usd_per_hour": found.price.usd if found.price else None,
        "zones": [
            {"zone": zone, "spot_usd_per_hour": found.spot.get(zone), "spot_score": found.scores.get(zone)}
            for zone in found.zones
        ],
        "quotas": [
            {"market": market, "code": one.quota.code, "vcpus": one.limit, "in_use": one.used}
            for market, one in found.quotas.items()
        ],
        "vcpus_needed": found.info.vcpus * nodes if found.info else None,
        "blocks": [
            {
                "id": one.capacity_block_offering_id,
                "zone": one.availability_zone,
                "nodes": one.instance_count,
                "starts": iso(one.start_date),
                "ends": iso(one.end_date),
                "usd": one.usd,
                "usd_per_hour": round(one.usd_per_hour, 4),
                "purchase": one.purchase(found.region),
            }
            for one in found.blocks
        ],
        "problems": {kind: error.message for kind, error in found.problems.items()},
    }
