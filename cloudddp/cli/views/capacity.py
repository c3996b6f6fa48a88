"""What AWS has and sells of instance types, as text."""

from __future__ import annotations

import textwrap

from cloudddp.cluster.survey import Place
from cloudddp.formats import dollars, table

_WIDTH = 70  # of a line of a command that continues on the next one


def place(found: Place) -> str:
    """Return what one region has of one type, with the command that buys the first capacity block."""
    lines = [f"{found.type} in {found.region}"]
    if (needed := found.vcpus_needed) is not None:
        lines.append(f"on demand  {dollars(found.usd_per_hour)} per node-hour")
        for quota in found.quotas:
            few = "" if quota.vcpus - quota.in_use >= needed else ": too few"
            used = f"{needed} vCPUs needed, {quota.in_use} of {quota.vcpus} in use"
            lines.append(f"quota      {quota.market}: {used}{few}")
        zones = [
            (
                zone.zone,
                dollars(zone.spot_usd_per_hour) if zone.spot_usd_per_hour else "-",
                str(zone.spot_score or "-"),
            )
            for zone in found.zones
        ]
        lines += table(("ZONE", "SPOT/H", "SPOT SCORE (OF 10, LOW FOR A SINGLE TYPE)"), zones).split("\n")
        lines += _blocks(found)
    lines += [f"{kind}: {problem}" for kind, problem in found.problems.items()]
    return "\n  ".join(lines)


def _blocks(found: Place) -> list[str]:
    if not found.blocks:
        kind = "type" if found.blocks is None else "length"
        return [] if "blocks" in found.problems else [f"no capacity block of this {kind} is for sale"]
    rows = [
        (
            block.id,
            block.zone,
            f"{block.starts:%Y-%m-%d %H:%M}",
            f"{block.usd:,.2f}",
            f"{block.usd_per_hour:.2f}",
        )
        for block in found.blocks
    ]
    command = textwrap.wrap(found.blocks[0].purchase, _WIDTH, break_on_hyphens=False)
    return [
        *table(("CAPACITY BLOCK", "ZONE", "START (UTC)", "USD", "NODE/H"), rows).split("\n"),
        "To buy the first one (AWS charges it at once, and it cannot be cancelled):",
        "  " + " \\\n      ".join(command),
    ]
