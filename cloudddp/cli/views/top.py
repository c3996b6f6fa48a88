"""What `top` shows, as lines and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from cloudddp.agent.protocol.progress import current_stragglers
from cloudddp.agent.protocol.readings import GpuReading, RankReading
from cloudddp.cli.views.clusters import spending
from cloudddp.cli.views.jobs import iso, jobs_json, state_text
from cloudddp.formats import cut, duration, table
from cloudddp.job.readings import READY, LatestReadings, NodeReadings
from cloudddp.text import node_list, one_line

BLOCKS = "▁▂▃▄▅▆▇█"
TREND, CELL = 8, 15.0  # characters of a trend, and seconds of each
NAME = 24  # columns of the name of a metric: a long one does not hide the others
HEADER = "NODE RANK GPU TREND MEM-GIB MEM-USE TEMP POWER CORES STEP S/STEP SLOW".split()
_SPARE = "MEM-USE TEMP POWER TREND MEM-GIB CORES".split()  # left out first where the terminal is too narrow


def lines(view: LatestReadings, width: int = 0) -> list[str]:
    """Return what is shown on a terminal of so many columns (0: on none)."""
    rows = sorted(_rows(view), key=lambda row: -row[0])  # a terminal may not have room for all
    text = table(HEADER, [cells for _, cells in rows], spare=_SPARE, width=width)
    found = [one_line(line) for line in (*_head(view), *text.split("\n"))]
    return [cut(line, width) for line in found] if width else found


def _head(view: LatestReadings) -> Iterator[str]:
    yield f"{view.cluster.name}: {spending(view.cluster)}"
    for state in dict.fromkeys(view.states.values()):
        nodes = [node for node, one in view.states.items() if one == state]
        problems = [view.nodes[node].problem for node in nodes if node in view.nodes]
        why = next((f": {problem}" for problem in problems if problem), "")
        yield f"{state}: {node_list(nodes)}{why}"
    if (job := view.job) is not None:
        progress = job.training.progress if job.training is not None else ""
        lasted = f" {'after' if job.status.ended else 'for'} {duration(job.seconds)}" if job.seconds else ""
        yield ", ".join(filter(None, (f"job {job.id}: {state_text(job)}{lasted}", progress)))
    if metrics := {name: value for name, value in view.metrics.items() if name not in ("step", "steps")}:
        yield "  ".join(
            f"{cut(one_line(name), NAME)} {'nan/inf' if value is None else format(value, '.4g')}"
            for name, value in metrics.items()
        )
    if job is not None and job.cause:
        yield job.cause
    elif view.line:
        yield f"rank 0: {view.line}"


def _rows(view: LatestReadings) -> Iterator[tuple[float, list[str]]]:
    """Yield a row for each rank and the GPU at the same place of ready nodes, and one for a node without
    both; each with how many times the median step a step takes, 0 for no straggler."""
    job = view.job
    slow = (
        {straggler.rank: straggler.ratio for straggler in current_stragglers(job.stragglers)}
        if job is not None
        else {}
    )
    for node, known in view.ready.items():
        newest = known.readings[-1]
        for at, (gpu, rank) in enumerate([*zip_longest(newest.gpus, newest.ranks)] or [(None, None)]):
            loads = [
                (reading.at, sample.utilization)
                for reading in known.readings
                for sample in reading.gpus[at : at + 1]
            ]
            ratio = slow.get(rank.rank, 0.0) if rank is not None else 0.0
            yield ratio, [str(node), *_cells(gpu, rank, sparkline(loads)), f"{ratio:.1f} x" if ratio else ""]


def _cells(gpu: GpuReading | None, rank: RankReading | None, loads: str) -> Iterator[str]:
    yield "-" if rank is None else str(rank.rank)
    yield "no GPU" if gpu is None else _shown(gpu.utilization, ".0f", "%")
    yield loads
    gpu, rank = gpu or GpuReading(0), rank or RankReading(0)
    yield _shown(gpu.memory and gpu.memory / 1024, ".1f", f"/{(gpu.memory_total or 0) / 1024:.0f}")
    yield _shown(gpu.memory_utilization, ".0f", "%")
    yield _shown(gpu.temperature, ".0f", "C")
    yield _shown(gpu.power, ".0f", "W")
    yield _shown(rank.cores, ".1f")
    yield _shown(rank.step, "d")
    yield _shown(rank.seconds, ".3g")


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def sparkline(points: Sequence[tuple[float, float | None]]) -> str:
    """Return a character per CELL seconds until the last point, for the mean percentage; ' ' for none."""
    cells: list[list[float]] = [[] for _ in range(TREND)]
    for at, value in points:
        if value is not None and 0 <= (age := points[-1][0] - at) < CELL * TREND:
            cells[-1 - int(age / CELL)].append(value)
    means = [sum(cell) / len(cell) if cell else None for cell in cells]
    levels = (mean if mean is None else min(int(mean / 100 * len(BLOCKS)), len(BLOCKS) - 1) for mean in means)
    return "".join(" " if level is None else BLOCKS[level] for level in levels)


def top_json(view: LatestReadings) -> dict[str, Any]:
    cluster, job, bill = view.cluster, view.job, view.cluster.cost()
    return {
        "time": iso(time.time()),
        "cluster": cluster.name,
        "cluster_id": cluster.id,
        "expires": cluster.expires.isoformat() if cluster.expires else None,
        "usd_per_hour": None if cluster.hour is None else round(cluster.hour, 4),
        "usd_so_far": None if bill.usd is None else round(bill.usd, 4),
        "job": None if job is None else jobs_json([job])[0],
        "metrics": view.metrics,
        "last_line": view.line or None,
        "nodes": [_node_json(view, node, state) for node, state in view.states.items()],
    }


def _node_json(view: LatestReadings, node: int, state: str) -> dict[str, Any]:
    known, instance = view.nodes.get(node, NodeReadings()), view.cluster.nodes.get(node)
    newest = known.readings[-1] if state == READY else None
    return {
        "node": node,
        "instance_id": instance and instance.id,
        "state": state,
        "problem": known.problem or None,
        "gpus": [asdict(gpu) for gpu in newest.gpus] if newest is not None else [],
        "ranks": [asdict(rank) for rank in newest.ranks] if newest is not None else [],
    }
