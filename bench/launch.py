"""From the command to the first line of a rank, and to its end: `cloudddp launch`, and torchrun typed by
hand.

Both run on the same two namespace nodes, in turns. By hand means one OpenSSH client per node, started at
once.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.cluster import Cluster
from bench.harness import Options, in_turns, rows_inside, script, start
from bench.tables import BENCHMARKS, conditions, line, load, ratios, spread, table, write_between

RUNS = 7
GOAL = 0.5  # seconds that `launch` may take more than 1.1 x by hand
SCRIPT = """\
import torch.distributed as d
d.init_process_group('gloo')
print('first line', flush=True)
d.barrier()
"""
_LAUNCH = ("launch", "--nproc-per-node", "2", "first.py")


def rows() -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Yield the seconds to the first line and to the end of each turn, of launch and by hand."""
    with tempfile.TemporaryDirectory() as folder, Cluster(2, Path(folder)) as cluster:
        (cluster.folder / "first.py").write_text(SCRIPT)
        ports = itertools.count(29600)
        launch = functools.partial(_first_line, cluster, [[script("cloudddp"), *_LAUNCH]])
        yield in_turns({"launch": launch, "by hand": lambda: _by_hand(cluster, next(ports))}, RUNS)


def _by_hand(cluster: Cluster, port: int) -> tuple[float, float]:
    """Start torchrun on each node."""
    head, addresses = cluster.private[0], enumerate(cluster.private)
    logins = [cluster.ssh(rank, warm=False) for rank in range(len(cluster.private))]
    return _first_line(
        cluster, [[*logins[rank], _torchrun(head, address, rank, port)] for rank, address in addresses]
    )


def _torchrun(head: str, own: str, node: int, port: int) -> str:
    is_host = "true" if node == 0 else "false"
    return (
        "cd project && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=ens5 PYTHONUNBUFFERED=1 "
        f"/opt/pytorch/bin/python -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --local-addr={own} "
        f"--rdzv-backend=c10d --rdzv-id={port} --rdzv-endpoint={head}:{port} --rdzv-conf=is_host={is_host} "
        "first.py"
    )


def _first_line(cluster: Cluster, commands: list[list[str]]) -> tuple[float, float]:
    """Return the seconds until any of the commands has written the first line, and until all have ended."""
    log = cluster.folder.parent / "output"
    with log.open("wb") as output:
        began = time.perf_counter()
        started = [start(command, env=cluster.env, cwd=cluster.folder, stdout=output) for command in commands]
        while b"first line" not in log.read_bytes():
            if all(one.poll() is not None for one in started) or time.perf_counter() - began > 120:
                raise RuntimeError(log.read_text())
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        for one in started:
            one.wait(timeout=120)
        return seconds, time.perf_counter() - began


def bench_launch(options: Options) -> None:
    """From the command to the first line of a rank: `launch`, and the same torchrun typed by hand."""
    print("launch: 2 namespace nodes x 2 ranks, from the command to the first line of a rank and to its end")
    before = load()
    (found,) = rows_inside(rows)
    cells = []
    for title, part in (("to the first line", 0), ("to the end", 1)):
        launched, typed = ([turn[part] for turn in found[side]] for side in ("launch", "by hand"))
        for name, row, unit in (
            ("cloudddp launch", launched, "s"),
            ("by hand, one ssh per node", typed, "s"),
            ("ratio of a turn", ratios(launched, typed), ""),
        ):
            line(f"{title}: {name}", row, unit)
            cells.append([f"{title}: {name}", *(f"{value:.2f} {unit}".strip() for value in spread(row))])
    ours, by_hand = (statistics.median(turn[0] for turn in found[side]) for side in ("launch", "by hand"))
    more = ours - 1.1 * by_hand
    where = f"{RUNS} turns, {conditions(before)}"
    print(f"  launch - 1.1 x by hand: {more:+.2f} s (goal: at most +{GOAL} s). {where}")
    if options.write:
        lines = [where, "", *table(["", "median", "minimum", "maximum"], cells)]
        write_between(BENCHMARKS, "python -m bench launch", lines)
    if more > GOAL:
        raise SystemExit(1)
