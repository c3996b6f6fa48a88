"""Numbers over steps or time: of metrics.jsonl, TensorBoard's event files, and the readings of the nodes. A
job may have written anything there."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from cloudddp.agent import replies
from cloudddp.agent.protocol import event_files
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.event_files import EVENTS, STEP, ScalarRow
from cloudddp.agent.protocol.readings import Reading
from cloudddp.job.results.safe_names import LOGS

METRICS = "metrics.jsonl"
MAX_CHARTS, MAX_FILES = 60, 200
# Bytes of all such files: nodes may wait for the report. Of longer ones pieces are looked at.
MAX_READ = 8 << 20
MAX_LINE, PIECE = 1 << 16, 1 << 14  # bytes
_SPAN = 1e100  # larger numbers are not drawn
_TIMES = ("time", "timestamp", "wall_time")
_NO_METRICS = frozenset((STEP, *_TIMES))
_COUNTERS = frozenset(("epoch", "step", "steps"))  # no curves
_EPOCH = 1e9  # seconds: smaller times are durations

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


def of_results(
    folder: Path, began: float = 0.0, *, is_first: bool = True
) -> tuple[list[Chart], list[tuple[str, str]]]:
    """Return a chart for each metric in the files of results, with a line for each folder that has it; and
    notes by file or folder. What was written before the job `began` (seconds since the epoch), and what a
    restart has superseded, is left out. `is_first`: the cluster had no job before."""
    files: list[Path] = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != LOGS)
        files += [Path(here, one) for one in sorted(names) if one == METRICS or EVENTS in one]
    times = {path: path.stat().st_mtime for path in files if path.is_file()}
    notes = [(path, "left out: written before the job began") for path in times if times[path] < began]
    own = [path for path in times if times[path] >= began][:MAX_FILES]
    runs: dict[tuple[Path, Path], list[ScalarRow]] = {}
    for path in own:
        run, read = (path, _metrics) if path.name == METRICS else (path.parent, _events)
        found = (row for row in read(path, MAX_READ // len(own)) if _is_drawable(row.step))
        runs.setdefault((run, path.parent), []).extend(found)
    values = []
    for (run, parent), rows in runs.items():
        since = [row for row in rows if row.at >= began]
        current, restarted = _current([row for row in since if row.x == STEP])
        if len(since) < len(rows):
            notes.append((run, "left out: what was written before the job began"))
        if not is_first and any(row.at == math.inf for row in since):
            notes.append((run, "its lines have no time, so some may be of an earlier job"))
        if restarted:
            notes.append((run, f"left out: values from step {restarted} on that a restart has superseded"))
        name = parent.relative_to(folder).as_posix()
        for row in (*current, *(row for row in since if row.x != STEP)):
            values += [(title, "", row.x, name, row.step, value) for title, value in row.values.items()]
    broken: dict[tuple[str, str], str] = {}
    for title, _, x, name, step, value in values:
        if type(value) is float and not math.isfinite(value):
            broken.setdefault((name, title), f"{title} is NaN or infinite, first at {x} {step}")
    notes += [(folder / name, note) for (name, _), note in broken.items()]
    return _charts(values), [(run.relative_to(folder).as_posix(), note) for run, note in notes]


def _current(rows: Sequence[ScalarRow]) -> tuple[list[ScalarRow], str]:
    """Return the rows without superseded values, and the first step of these, '' without one. As in
    TensorBoard, a restart at a step supersedes what was written before for it and later ones. The run was
    restarted where the step falls; but if it falls and that of no metric does, metrics count different steps
    (batches and epochs), and each one restarts where its own falls."""
    last: dict[str, Any] = {}
    falls, several, before = [], False, -math.inf
    for row in rows:
        names = [name for name in row.values if row.step < last.get(name, row.step)]
        falls.append((row.step < before, names))
        several = several or (row.step < before and not names and not row.restarts)
        last.update(dict.fromkeys(row.values, row.step))
        before = row.step
    limits: dict[str, Any] = {}  # by metric; '' for all
    current, superseded = [], []
    for row, (falls_back, names) in zip(reversed(rows), reversed(falls), strict=True):
        most = limits.get("", math.inf)
        values = {k: v for k, v in row.values.items() if row.step < min(most, limits.get(k, most))}
        superseded += [row.step] if len(values) < len(row.values) else []
        current.append(row._replace(values=values))
        for name in [""] if row.restarts or (falls_back and not several) else names:
            limits[name] = min(limits.get(name, row.step), row.step)
    return current[::-1], f"{min(superseded):.6g}" if superseded else ""


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
    found: dict[tuple[str, str], Chart] = {}
    for title, unit, x, name, at, value in values:
        key = title, x
        counts = title.partition(",")[0].rpartition("/")[2] in _COUNTERS
        fits = key in found or len(found) <= MAX_CHARTS
        if fits and not counts and _is_drawable(at) and _is_drawable(value):
            found.setdefault(key, Chart(title, unit, x, {})).lines.setdefault(name, []).append((at, value))
    return list(found.values())


def _is_drawable(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -_SPAN < value < _SPAN  # neither nan nor infinite


def _events(path: Path, most: int) -> Iterator[ScalarRow]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        yield from event_files.rows(file, most)


def _metrics(path: Path, most: int) -> Iterator[ScalarRow]:
    for number, line in lines(path, most):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                kind = f"{found['kind']}/"[:40] if isinstance(found.get("kind"), str) else ""
                values = {f"{kind}{name[:200]}": found[name] for name in found if name not in _NO_METRICS}
                x = STEP if STEP in found else "row"
                yield ScalarRow(found.get(STEP, number), values, _written(found), x=x)


def _written(line: Mapping[str, Any]) -> float:
    """Return when a line was written by what it says, in seconds since the epoch; inf for no such time."""
    for value in map(line.get, _TIMES):
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, str) and (at := datetime.fromisoformat(value)).tzinfo:
                return at.timestamp()
        if _is_drawable(value) and value >= _EPOCH:
            return value / 1000.0 ** int(math.log(value / _EPOCH, 1000))  # of milliseconds or less
    return math.inf


def _readings(path: Path, most: int) -> Iterator[Reading]:
    for _, line in lines(path, most):
        with contextlib.suppress(ProtocolError):
            yield replies.decode(line, Reading)


def _measured(node: int, row: Reading) -> Iterator[tuple[str, str, str, float | None]]:
    for rank in row.ranks:
        yield "Step time", "s", f"rank {rank.rank}", rank.seconds
        yield "CPU cores in use", "", f"rank {rank.rank}", rank.cores
    for gpu in row.gpus:
        name = f"node {node}, GPU {gpu.index}"
        yield "GPU utilization", "%", name, gpu.utilization
        yield "GPU memory", "GiB", name, gpu.memory and gpu.memory / 1024
    for metric, value in row.metrics.items():
        yield f"{metric}, as reported", "", f"node {node}", value
