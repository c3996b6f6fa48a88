"""What `top` shows, as lines and as JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, NamedTuple

from cloudddp.agent.protocol.progress import current_stragglers
from cloudddp.agent.protocol.readings import GpuReading, RankReading
from cloudddp.cli.views.clusters import amount, end_of
from cloudddp.cli.views.jobs import iso, state_text
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.formats import cut, dollars, duration, table
from cloudddp.job import status
from cloudddp.job.readings import NodeReadings
from cloudddp.job.status import JobRecord
from cloudddp.text import one_line

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
CELL = 20.0  # seconds of one character of a trend
BOOTING = 600.0  # seconds after its launch in which a node that has never answered probably boots
READY, CONNECTING, SILENT = "ready", "connecting", "not responding"
HEADER = "NODE RANK GPU TREND MEM-GIB TEMP POWER CORES STEP S/STEP STEPS SLOW".split()
_SPARE = "STEPS TEMP POWER TREND MEM-GIB CORES".split()  # left out first where the terminal is too narrow
_FIRST = ("loss", "samples", "tokens")  # how the names of the metrics begin that are shown first

Line = tuple[str, str]
"""A text without line breaks, and its style for rich."""
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a cluster at `now` (seconds since the epoch) and `clock` (by the monotonic clock).
    Readings arrive every `interval` seconds. `problem`: why AWS does not answer."""

    cluster: Cluster
    nodes: Mapping[int, NodeReadings]
    interval: float
    now: float
    clock: float
    problem: str = ""

    @property
    def ranks(self) -> list[int]:
        """The node ranks, also those of nodes that have ended."""
        return sorted({*range(len(self.cluster.nodes) + self.cluster.missing), *self.cluster.nodes})

    def silence(self, node: int) -> float | None:
        """Seconds since the last reading of a node; None if there was none."""
        known = self.nodes.get(node)
        return None if known is None or known.at is None else self.clock - known.at

    def state(self, node: int) -> str:
        """Return `ready`, or why there are no readings of a node."""
        instance, known, silence = self.cluster.nodes.get(node), self.nodes.get(node), self.silence(node)
        if instance is None or instance.state not in ("pending", "running"):
            return "lost" if instance is None else instance.state
        problem = known is not None and known.problem
        if silence is not None:
            limit = max(timing.current().quiet, 3 * self.interval)
            return SILENT if problem or silence > limit else READY
        age = self.now - instance.launched.timestamp() if instance.launched else BOOTING
        if instance.state == "pending" or (problem and age < BOOTING):
            return "booting"
        return SILENT if problem else CONNECTING

    @property
    def ready(self) -> dict[int, NodeReadings]:
        return {node: one for node, one in self.nodes.items() if self.state(node) == READY}

    @property
    def job(self) -> JobRecord | None:
        """The newest job of the nodes that are ready."""
        states = {node: one.job for node, one in self.ready.items() if one.job is not None}
        newest = max((one.job for one in states.values()), default="")
        same = {node: one for node, one in states.items() if one.job == newest}
        return status.record(newest, same) if same else None

    @property
    def reported(self) -> list[tuple[float, dict[str, float]]]:
        """When rank 0 had reported which numbers in its status file, the newest last."""
        found = (one.readings for one in self.ready.values() if one.readings[-1].metrics)
        return [(one.at, one.metrics) for one in next(found, ())]


class Row(NamedTuple):
    """A line of the table. The smallest `urgency` is shown first, where not all fit: stragglers, long steps,
    idle GPUs. `slow`: how many times the median step a step of the rank takes, 0 if it is no straggler."""

    urgency: tuple[float, float, float]
    slow: float
    cells: list[str]


def rows(view: Snapshot, trend: int = 0, blocks: str = BLOCKS) -> list[Row]:
    """Return a row for each rank and the GPU at the same place, of the nodes that are ready, and one for a
    node without both. `trend`: characters of a trend."""
    job, cell, found = view.job, max(CELL, view.interval), []
    slow = {one.rank: one.ratio for one in current_stragglers(job.stragglers)} if job is not None else {}
    for node, known in sorted(view.ready.items()):
        newest = known.readings[-1]
        for place, (gpu, rank) in enumerate([*zip_longest(newest.gpus, newest.ranks)] or [(None, None)]):
            loads = [(one.at, one.gpus[place].utilization) for one in known.readings if place < len(one.gpus)]
            steps = [(one.at, one.ranks[place].seconds) for one in known.readings if place < len(one.ranks)]
            longest = max((value for _, value in steps if value), default=0.0)
            trends = (
                sparkline(loads, cell, trend, 100.0, blocks),
                sparkline(steps, cell, trend, longest, blocks),
            )
            ratio = slow.get(rank.rank, 0.0) if rank is not None else 0.0
            load = gpu.utilization if gpu is not None else None
            urgency = (-ratio, -((rank and rank.seconds) or 0.0), 100 if load is None else load)
            found.append(Row(urgency, ratio, [str(node), *_cells(rank, gpu, *trends, ratio)]))
    return found


def _cells(
    rank: RankReading | None, gpu: GpuReading | None, loads: str, steps: str, ratio: float
) -> Iterator[str]:
    yield "-" if rank is None else str(rank.rank)
    yield "no GPU" if gpu is None else _shown(gpu.utilization, ".0f", "%")
    yield loads
    rank, gpu = rank or RankReading(0), gpu or GpuReading(0)
    used, total = ((one or 0) / 1024 for one in (gpu.memory, gpu.memory_total))
    yield "-" if gpu.memory is None else f"{used:.1f}/{total:.0f}"
    yield _shown(gpu.temperature, ".0f", "C")
    yield _shown(gpu.power, ".0f", "W")
    yield _shown(rank.cores, ".1f")
    yield _shown(rank.step, ".0f")
    yield _shown(rank.seconds, ".3g")
    yield steps
    yield f"{ratio:.1f} x" if ratio else ""


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def sparkline(points: Points, cell: float, width: int, top: float, blocks: str) -> str:
    """Return a character for each `cell` seconds until the last point, for the mean of the values, of which
    `top` is the highest; ' ' without any."""
    found: list[list[float]] = [[] for _ in range(width)]
    for at, value in points:
        if value is not None and 0 <= (age := points[-1][0] - at) < cell * width:
            found[-1 - int(age / cell)].append(value)
    levels = [int(sum(one) / len(one) / top * len(blocks)) if one and top > 0 else 0 for one in found]
    drawn = [blocks[min(max(level, 0), len(blocks) - 1)] for level in levels]
    return "".join(char if one else " " for char, one in zip(drawn, found, strict=True))


def lines(view: Snapshot, width: int = 0, height: int = 0, blocks: str = BLOCKS) -> list[Line]:
    """Return what is shown on a terminal of that size: not all ranks if they do not fit, the slow ones first.
    0 is no limit, and no trends."""
    problems = [(text, "red") for text in _problems(view)]
    if 0 < height // 3 < len(problems):
        problems[height // 3 - 1 :] = [(f"... and {len(problems) - height // 3 + 1} more", "red")]
    above = [(text, "bold") for text in _head(view)] + problems
    found = rows(view, 0 if not width else 6 if width < 100 else 12, blocks)
    room = max(height - len(above) - 2, 1) if height else len(found)
    shown = found if len(found) <= room else sorted(found)[:room]
    used = [at for at in range(len(HEADER)) if any(row.cells[at].strip(" -") for row in shown)]
    header, *body = [[cells[at] for at in used] for cells in (HEADER, *(row.cells for row in shown))]
    text = table(header, body, spare=[name for name in _SPARE if name in header], width=width)
    styles = ["", *("yellow" if row.slow else "" for row in shown)]
    below = list(zip(text.split("\n"), styles, strict=True)) if shown else []
    more = [(f"... and {len(found) - len(shown)} more", "")] if len(shown) < len(found) else []
    return [(cut(one_line(text), width or 10_000), style) for text, style in (*above, *below, *more)]


def _head(view: Snapshot) -> list[str]:
    cluster, job, hour = view.cluster, view.job, view.cluster.hour
    so_far = amount(cluster.cost(datetime.fromtimestamp(view.now, UTC)))
    price = "price unknown" if hour is None else f"{dollars(hour)} an hour"
    states = Counter(map(view.state, view.ranks)).items()
    found = [
        f"{cluster.name}: {so_far} so far, {price}; {end_of(cluster)}",
        "nodes: " + ", ".join(f"{count} {state}" for state, count in states),
    ]
    if job is not None:
        code = f" with exit code {job.exit_code}" if job.exit_code else ""
        found.append(f"job {job.id}: {state_text(job)}{code}{_progress(view, job)}")
    metrics = view.reported[-1][1] if view.reported else {}
    names = sorted(metrics.keys() - {"step", "steps"}, key=lambda name: (not name.startswith(_FIRST), name))
    return [*found, "  ".join(f"{name} {metrics[name]:.4g}" for name in names)] if names else found


def progress(view: Snapshot) -> tuple[float | None, float | None, float | None]:
    """Return the step, the number of steps, and the seconds that are left at the pace of late."""
    points = [(at, found["step"]) for at, found in view.reported if "step" in found]
    if not points:
        ranks = [one for known in view.ready.values() for one in known.readings[-1].ranks]
        return max((one.step for one in ranks if one.step is not None), default=None), None, None
    (began, first), (at, step), steps = points[0], points[-1], view.reported[-1][1].get("steps")
    pace = (step - first) / (at - began) if at > began else 0.0
    left = (steps - step) / pace if steps is not None and pace > 0 else -1.0
    return step, steps, left if 0 <= left < 1e9 else None


def _progress(view: Snapshot, job: JobRecord) -> str:
    step, steps, left = progress(view)
    of = "" if steps is None else f" of {steps:.0f}"
    rest = "" if left is None or job.status.ended else f", about {duration(left)} left"
    return "" if step is None else f", step {step:.0f}{of}{rest}"


def _problems(view: Snapshot) -> list[str]:
    """Return a line for each node without readings."""
    found = [f"AWS cannot be asked: {view.problem}"] if view.problem else []
    for node in view.ranks:
        if (state := view.state(node)) != READY:
            silence, known = view.silence(node), view.nodes.get(node)
            since = "" if silence is None else f", the last reading was {duration(silence)} ago"
            why = f": {known.problem}" if known is not None and known.problem else ""
            found.append(f"node {node}: {state}{since}{why}")
    return found


def top_json(view: Snapshot) -> dict[str, Any]:
    cluster, job, bill = view.cluster, view.job, view.cluster.cost(datetime.fromtimestamp(view.now, UTC))
    step, steps, left = progress(view)
    return {
        "time": iso(view.now),
        "cluster": cluster.name,
        "cluster_id": cluster.id,
        "expires": cluster.expires.isoformat() if cluster.expires else None,
        "usd_per_hour": None if cluster.hour is None else round(cluster.hour, 4),
        "usd_so_far": None if bill.usd is None else round(bill.usd, 4),
        "job": job
        and {
            "id": job.id,
            "state": job.status,
            "exit_code": job.exit_code,
            "step": step if step is None else int(step),
            "steps": steps if steps is None else int(steps),
            "seconds_left": left and round(left, 1),
            "metrics": view.reported[-1][1] if view.reported else {},
            "stragglers": [one.rank for one in current_stragglers(job.stragglers)],
        },
        "nodes": [_node_json(view, node) for node in view.ranks],
    }


def _node_json(view: Snapshot, node: int) -> dict[str, Any]:
    known, silence, instance = view.nodes.get(node), view.silence(node), view.cluster.nodes.get(node)
    newest = view.ready[node].readings[-1] if node in view.ready else None
    return {
        "node": node,
        "instance_id": instance and instance.id,
        "state": view.state(node),
        "silent_seconds": silence and round(silence, 1),
        "problem": (known.problem if known is not None else "") or None,
        "gpus": [asdict(one) for one in newest.gpus] if newest is not None else [],
        "ranks": [asdict(one) for one in newest.ranks] if newest is not None else [],
    }
