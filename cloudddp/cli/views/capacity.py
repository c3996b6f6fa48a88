"""What AWS has and sells of instance types, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from cloudddp.aws.offerings import Block
from cloudddp.cluster.survey import Place
from cloudddp.errors import Command, Text
from cloudddp.formats import dollars, table
from cloudddp.tags import iso

MOST = 5  # capacity blocks of a place that the text shows
_WIDTH = 76  # of a line of a command that continues on the next one


def place(found: Place) -> str:
    """Return what one region has of one type."""
    price = f"{dollars(found.price.usd)} per node-hour ({found.price.source})" if found.price else "unknown"
    problems = [f"  {kind}: {error.message}" for kind, error in found.problems.items()]
    lines = [f"{found.type} in {found.region}"]
    if found.info is None:
        return "\n".join(lines + problems)
    lines.append(f"  on demand  {price}")
    for market, quota in found.quotas.items():
        used = f"{quota.needed} vCPUs needed, {quota.used} of {quota.limit} in use"
        lines.append(f"  quota      {market}: {used}{'' if quota.suffices else ': too few'}")
    zones = [
        (zone, dollars(found.spot.get(zone)) if zone in found.spot else "-", str(found.scores.get(zone, "-")))
        for zone in found.zones
    ]
    blocks = [
        (
            one.capacity_block_offering_id,
            one.availability_zone,
            f"{one.start_date:%Y-%m-%d %H:%M}",
            f"{one.usd:,.2f}",
            f"{one.usd_per_hour:.2f}",
        )
        for one in found.blocks[:MOST]
    ]
    lines += _table(("ZONE", "SPOT/H", "SPOT SCORE (OF 10, LOW FOR A SINGLE TYPE)"), zones)
    lines += _table(("CAPACITY BLOCK", "ZONE", "START (UTC)", "USD", "NODE/H"), blocks)
    if len(found.blocks) > MOST:
        lines.append(f"  and {len(found.blocks) - MOST} later ones: --json")
    if not blocks and "blocks" not in found.problems:
        lines.append("  no capacity block of this length is for sale")
    return "\n".join(lines + problems)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in table(header, rows).split("\n")] if rows else []


def purchases(found: Sequence[Place], render: Callable[[Text], str]) -> str:
    """Return the commands that buy the blocks that are shown, and how to use one; '' for none."""
    lines = ["To buy a block (AWS charges it at once, and it cannot be cancelled):"]
    blocks = [(one, place) for place in found for one in place.blocks[:MOST]]
    if not blocks:
        return ""
    for one, place in blocks:
        command = textwrap.wrap(f"  {_purchase(one, place, render)}", _WIDTH, break_on_hyphens=False)
        lines.append(" \\\n      ".join(command))
    one, place = blocks[0]
    words = ("--reservation", "cr-...", "-t", place.type, "-n", str(one.instance_count))
    use = render(Command("up", *words, "--region", place.region)).strip("`")
    return "\n".join([*lines, "From its start on, with the reservation id that this answers:", f"  {use}"])


def _purchase(block: Block, place: Place, render: Callable[[Text], str]) -> str:
    return render(block.purchase(place.region)).strip("`")


def record(found: Place, nodes: int, render: Callable[[Text], str]) -> dict[str, Any]:
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
                "purchase": _purchase(one, found, render),
            }
            for one in found.blocks
        ],
        "problems": {kind: error.message for kind, error in found.problems.items()},
    }
