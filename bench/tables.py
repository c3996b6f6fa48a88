"""Figures as lines and as tables, and the pages of docs/ that have them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BENCHMARKS = DOCS / "benchmarks.md"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each turn."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def spread(row: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum."""
    return statistics.median(row), min(row), max(row)


def line(name: str, row: Sequence[float], unit: str = "") -> None:
    middle, low, high = spread(row)
    print(f"  {name:<50} {middle:8.3f} {unit:<2} ({low:.3f} to {high:.3f})", flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [cells[0], "|" + "---|" * len(head), *cells[1:]]


def conditions(load_before: float) -> str:
    """Return when and where a benchmark ran, which began at this load average."""
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors"
    return f"{machine}, load average {load_before:.1f} before and {load():.1f} after."


def load() -> float:
    return os.getloadavg()[0]


def write_between(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines into a Markdown page, between its comments `NAME: begin` and `NAME: end`."""
    begin, end = (f"<!-- {name}: {which} -->" for which in ("begin", "end"))
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no {begin} ... {end}")
    page.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]))
