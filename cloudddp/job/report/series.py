"""Numbers over steps or time: of metrics.jsonl, TensorBoard's event files, and the readings of the nodes. A
job may have written anything there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp.agent import replies
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.readings import Reading
from cloudddp.job.report import event_files
from cloudddp.job.results.safe_names import LOGS

METRICS = "metrics.jsonl"
EVENTS = "tfevents"  # in the names of TensorBoard's files
MAX_CHARTS, MAX_FILES = 60, 200
# Bytes of all such files: nodes may wait for the report. Of longer ones pieces are looked at.
MAX_READ = 8 << 20
MAX_LINE, PIECE = 1 << 16, 1 << 14  # bytes
_SPAN = 1e100  # larger numbers are not drawn
_NO_METRICS = frozenset(("step", "time", "timestamp", "wall_time"))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines by name, over `x`."""

    title: str
    unit: str
    x: str
    lines: dict[str, list[Point]]


def thin(points: list[Point], most: int) -> list[Point]:
    """Return at most `most` (4 or more) of the points, by x: of each part the smallest and the largest."""
    points = sorted(points, key=lambda point: point[0])
    if len(points) <= most:
        return points
    parts, found = most // 2 - 1, points[:1]
    for number in range(parts):
        part = points[len(points) * number // parts : len(points) * (number + 1) // parts]
        found += sorted((min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])))
    return [*found, points[-1]]


def head(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file; nothing where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(most)
    return b""


def lines(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers; of one with more than `most` bytes those of pieces at
    equal distances, with about their numbers."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size, number = os.fstat(file.fileno()).st_size, 0
        times = max(size / max(most, 1), 1)  # as long as it may be
        piece = PIECE if times > 1 else size + 1
        for begin in range(0, size, int(piece * times)):
            if begin:
                file.seek(begin)
                file.readline(MAX_LINE)  # the rest of a line
            while file.tell() < begin + piece and (line := file.readline(MAX_LINE)):
                yield int(number * times), line
                number += 1


def of_results(folder: Path) -> list[Chart]:
    """Return a chart for each metric in the files of results, with a line for each folder that has it."""
    files: list[Path] = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != LOGS)
        files += [Path(here, one) for one in sorted(names) if one == METRICS or EVENTS in one]
    shown = [
        (path, path.parent.relative_to(folder).as_posix()) for path in files[:MAX_FILES] if path.is_file()
    ]
    return _charts(
        (name, "", "step", line, step, value)
        for path, line in shown
        for name, step, value in (_metrics if path.name == METRICS else _events)(path, MAX_READ // len(shown))
    )


def of_readings(files: Mapping[int, Path]) -> list[Chart]:
    """Return charts of what the nodes have measured, over the minutes since the first reading."""
    rows = [(node, row) for node, path in files.items() for row in _readings(path, MAX_READ // len(files))]
    began = min((row.at for _, row in rows), default=0.0)
    return _charts(
        (title, unit, "minutes", name, round((row.at - began) / 60, 2), value)
        for node, row in rows
        for title, unit, name, value in _measured(node, row)
    )


def _charts(values: Iterable[tuple[str, str, str, str, Any, Any]]) -> list[Chart]:
    """Return charts of values, given with their title, unit, x, the name of their line, and the point."""
    found: dict[str, Chart] = {}
    for title, unit, x, name, at, value in values:
        if _is_drawable(at) and _is_drawable(value) and (title in found or len(found) <= MAX_CHARTS):
            found.setdefault(title, Chart(title, unit, x, {})).lines.setdefault(name, []).append((at, value))
    return list(found.values())


def _is_drawable(value: Any) -> bool:
    return type(value) in (int, float) and -_SPAN < value < _SPAN  # neither nan nor infinite


def _events(path: Path, most: int) -> Iterator[event_files.Scalar]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        yield from event_files.scalars(file, most)


def _metrics(path: Path, most: int) -> Iterator[tuple[str, Any, Any]]:
    for number, line in lines(path, most):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                kind = f"{found['kind']}/"[:40] if isinstance(found.get("kind"), str) else ""
                names = [name for name in found if name not in _NO_METRICS]
                yield from ((f"{kind}{name[:200]}", found.get("step", number), found[name]) for name in names)


def _readings(path: Path, most: int) -> Iterator[Reading]:
    for _, line in lines(path, most):
        with contextlib.suppress(ProtocolError):
            yield replies.decode(line, Reading)


def _measured(node: int, row: Reading) -> Iterator[tuple[str, str, str, float | None]]:
    for rank in row.ranks:
        yield "Step time", "s", f"rank {rank.rank}", rank.seconds
    for gpu in row.gpus:
        name = f"node {node}, GPU {gpu.index}"
        yield "GPU utilization", "%", name, gpu.utilization
        yield "GPU memory", "GiB", name, gpu.memory and gpu.memory / 1024
    for metric, value in row.metrics.items():
        if metric != "steps":
            yield f"{metric}, as reported", "", f"node {node}", value
