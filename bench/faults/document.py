"""The table of docs/faults.md."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from bench.common import ROOT, replace_between
from bench.faults.cases import FAULTS
from bench.faults.measure import Row

PAGE = ROOT / "docs" / "faults.md"
HEAD = (
    "| fault | nodes x ranks | the command says | connected: s, exit | detached: s, exit | `jobs` | left |",
    "|---|---|---|---|---|---|---|",
)
LAPTOP = "the laptop is killed at ten moments of `launch`"


def table(found: Sequence[Row]) -> list[str]:
    """Return the lines of the table."""
    lines = []
    for fault, shape in dict.fromkeys((row.fault, row.shape) for row in found):
        both = [row for row in found if (row.fault, row.shape) == (fault, shape)]
        connected, detached = ([row for row in both if row.attached is how] for how in (True, False))
        states = dict.fromkeys(row.state or "-" for row in both)
        cells = [
            fault, shape, next((row.says for row in both if row.says), "-").replace("|", "/"),
            *(_cell(one[0]) if one else "-" for one in (connected, detached)),
            ", ".join(states), str(sum(row.left for row in both)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(row: Row) -> str:
    if row.exit_code is None:
        return "; ".join(row.problems) or "-"
    seconds = "goes on" if row.went_on else f"{row.seconds:.1f}"
    if row.again is not None:
        seconds += f", again after {row.again:.1f}"
    return f"{seconds}, {row.exit_code}"


def write(found: Sequence[Row], load: float) -> None:
    """Put rows into the page, in the place of older ones of the same fault and shape."""
    text = PAGE.read_text()
    kept: dict[tuple[str, ...], str] = {}
    for line in [*text.splitlines(), *table(found)]:
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | ")[:2])
        if line.startswith("| ") and len(cells) == 2 and not line.startswith("| fault "):
            kept[cells] = line
    order = [(fault.name, shape) for shape in ("2 x 2", "4 x 1") for fault in FAULTS] + [(LAPTOP, "2 x 2")]
    lines = [kept[key] for key in order if key in kept]
    machine = (
        f"Last run: {len(found)} runs, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, on a machine that was not "
        f"idle: load average {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    PAGE.write_text(replace_between(text, "python -m bench faults", [machine, "", *HEAD, *lines]))
