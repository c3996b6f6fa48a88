"""Where the seconds of a command go: spans of time, which `--timings` prints as a waterfall.

The code that takes the time opens a span; the edge switches the recording on and prints it. Standard library
only, and no names of nodes or files: every layer may use it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LOADED = time.monotonic()  # the edge imports this module first
_MOST = 1000  # spans that are kept: `watch` and `logs -f` may run for days
_ROWS = 200  # of a waterfall: those of `run` are 70
_WIDTH = 20  # characters of a bar: a line fits 80 columns

_spans: list[Span] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """What happened from `began` to `ended`, by the monotonic clock; `node` where it happened on several at
    once. Of a call of AWS: the code of its `error`, or '', and how often botocore has repeated it."""

    name: str
    began: float
    ended: float
    node: int | None = None
    error: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the waterfall: one span, or those of the same name that several nodes had at the same
    time."""

    name: str
    began: float
    ended: float
    nodes: int = 0
    slowest: int | None = None


def enable() -> None:
    """Record from now on, and what has passed since the process was started."""
    global _spans
    now = time.monotonic()
    _spans = [
        Span("start of Python", _process_began(), _LOADED),
        Span("imports: command line", _LOADED, now),
    ]


@contextlib.contextmanager
def span(name: str, node: int | None = None) -> Iterator[None]:
    """Record how long a block takes, or each call of a function that this decorates. Any thread may use
    it."""
    began = time.monotonic()
    try:
        yield
    finally:
        add(name, began, time.monotonic(), node)


def add(
    name: str, began: float, ended: float, node: int | None = None, *, error: str = "", retries: int = 0
) -> None:
    """Record a span that was measured elsewhere, by the monotonic clock of this computer."""
    if _spans is not None and len(_spans) < _MOST:
        _spans.append(Span(name, began, ended, node, error, retries))


def mark(name: str) -> None:
    """Record the first moment of that name."""
    if _spans is not None and all(one.name != name for one in _spans):
        now = time.monotonic()
        add(name, now, now)


def recorded() -> list[Span]:
    """Return what has been recorded, in the order in which the spans ended."""
    return list(_spans or [])


def finish() -> str:
    """Return the waterfall of what was recorded, after a line with the total; '' if nothing was. The
    recording ends."""
    global _spans
    found, _spans = _spans, None
    if found:
        found.append(Span("total", found[0].began, time.monotonic()))
    return waterfall(rows(found or []))


def rows(spans: Sequence[Span]) -> list[Row]:
    """Return the lines of a waterfall, by their beginning. Spans of several nodes that overlap make one line.
    Pure."""
    found = [Row(one.name, one.began, one.ended) for one in spans if one.node is None]
    groups: dict[str, list[Span]] = {}
    for one in sorted((one for one in spans if one.node is not None), key=lambda one: one.began):
        group = groups.setdefault(one.name, [])
        if group and one.began > max(other.ended for other in group):  # a pause is not shown as work
            found.append(_row(group))
            group.clear()
        group.append(one)
    found += map(_row, groups.values())
    return sorted(found, key=lambda row: (row.began, -row.ended))


def _row(group: Sequence[Span]) -> Row:
    slowest = max(group, key=lambda one: one.ended - one.began)
    began, ended = min(one.began for one in group), max(one.ended for one in group)
    return Row(slowest.name, began, ended, len({one.node for one in group}), slowest.node)


def waterfall(found: Sequence[Row]) -> str:
    """Return the lines as text: when each began, how long it took, what it was, and a bar to scale. Pure.

    Seconds, from the beginning of the first line.
    """
    if not found:
        return ""
    zero, end = found[0].began, max(row.ended for row in found)
    scale = _WIDTH / max(end - zero, 1e-9)
    lines = [" begin   took  (seconds)"]
    for row in found[:_ROWS]:
        left = min(round((row.began - zero) * scale), _WIDTH - 1)
        length = max(1, round((row.ended - row.began) * scale))
        bar = (" " * left + "#" * length)[:_WIDTH]
        lines.append(
            f"{row.began - zero:6.3f} {row.ended - row.began:6.3f}  {_label(row):<44} {bar}".rstrip()
        )
    if len(found) > _ROWS:
        lines.append(f"and {len(found) - _ROWS} more")
    return "\n".join(lines)


def _label(row: Row) -> str:
    return f"{row.name} ({row.nodes} nodes, slowest {row.slowest})" if row.nodes > 1 else row.name


def _process_began() -> float:
    """Return when this process was started, by the monotonic clock, to 10 ms; where there is no /proc, when
    this module was imported."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123  pathlib takes longer to import than this to read
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return min(_LOADED, time.monotonic() - age)
    return _LOADED
