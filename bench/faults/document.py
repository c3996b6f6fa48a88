"""The table of docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence

from bench.faults.cases import FAULTS
from bench.faults.measure import Row
from bench.tables import DOCS, conditions, table, write_between

PAGE = DOCS / "faults.md"
HEAD = (
    "fault",
    "nodes x ranks",
    "the command says",
    "connected: s, exit",
    "detached: s, exit",
    "`jobs`",
    "left",
)
LAPTOP = "the laptop is killed at ten moments of `launch`"


def cells(found: Sequence[Row]) -> list[list[str]]:
    """Return the rows of the table, each of a job that was connected and one that was detached."""
    return [
        _cells([row for row in found if (row.fault, row.shape) == key])
        for key in dict.fromkeys((row.fault, row.shape) for row in found)
    ]


def _cells(both: list[Row]) -> list[str]:
    how = {row.attached: row.result for row in both}
    return [
        both[0].fault,
        both[0].shape,
        next((row.says for row in both if row.says), "-").replace("|", "/"),
        *(how.get(attached, "-") for attached in (True, False)),
        ", ".join(dict.fromkeys(row.state or "-" for row in both)),
        str(sum(row.left for row in both)),
    ]


def write(found: Sequence[Row], load_before: float) -> None:
    """Put rows into the page, in the place of older ones of the same fault and shape."""
    kept: dict[tuple[str, str], list[str]] = {}
    older = [line[2:-2].split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for one in [*older, *cells(found)]:
        kept[one[0], one[1]] = one
    order = [(fault.name, shape) for shape in ("2 x 2", "4 x 1") for fault in FAULTS] + [(LAPTOP, "2 x 2")]
    machine = f"Last run: {len(found)} runs, {conditions(load_before)}"
    lines = table(HEAD, [kept[key] for key in order if key in kept])
    write_between(PAGE, "python -m bench faults", [machine, "", *lines])
