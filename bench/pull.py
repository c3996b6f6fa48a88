"""`cloudddp pull` side by side with rsync, on namespace nodes: seconds, bytes that the laptop received, its processor time.

`python -m bench pull` starts a simulator and runs this file in its network with `cloudddp sim exec`. Contenders, each
with a folder of its own on the laptop, in turns:

    cloudddp   `cloudddp pull`, of all nodes with --all-nodes; it connects anew as every command does
    open       the same transfer in this process, over connections that are open
    warm       one `rsync -a` per node in parallel, over OpenSSH connections that are open (ControlMaster)
    cold       the same, each over a connection of its own

Every turn has new random content, and all contenders find empty folders, except for `unchanged`. The files are in the page
cache, and the folders are memory, so that neither side waits for a disk.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also run as a file

from bench import traffic
from bench.transfers import CASES, MBIT, TITLES, Case, Cluster, Link, Row, print_rows, report, together

CONTENDERS = ("cloudddp", "open", "warm", "cold")
PULLED = ("2000", "20000", "1gb", "unchanged")
NODES = (1, 4)
ROUND_TRIPS = (0, 50)
TURNS = 3
_MEMORY = "/dev/shm"  # noqa: S108

FILL = """
import os, shutil
shutil.rmtree("project/runs", ignore_errors=True)
for number in range({files}):
    folder = f"project/runs/d{{number % 40}}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{{folder}}/f{{number}}.bin", "wb") as file:
        for start in range(0, {size}, 1 << 24):
            file.write(os.urandom(min(1 << 24, {size} - start)))
    os.utime(f"{{folder}}/f{{number}}.bin", ns=(1_700_000_000_123_456_789 + number,) * 2)
"""


def fill(cluster: Cluster, case: Case) -> None:
    """Write new random files on every node."""
    code = FILL.format(files=case.files, size=case.size)
    cluster.everywhere(f"python3 - <<'EOF'\n{code}\nEOF")


def rsync(cluster: Cluster, to: Path, *, warm: bool) -> None:
    shell = " ".join(cluster.ssh(warm=warm))
    folders = [to / f"node{rank}" for rank in range(len(cluster.public))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    together(
        [
            ["rsync", "-a", "-e", shell, f"ubuntu@{address}:project/runs", f"{folder}/"]
            for address, folder in zip(cluster.public, folders, strict=True)
        ]
    )


def transfer(runner: Any, to: Path) -> None:
    from cloudddp.job.results import pull

    runner.each(lambda rank: pull.pull(runner, ["runs"], node=rank, to=to / f"node{rank}")).all()


def contenders(cluster: Cluster, runner: Any, project: Path, to: Path) -> dict[str, Callable[[], object]]:
    words = ("pull", "--all-nodes", "--to", str(to / "cloudddp"), "runs")
    return {
        "cloudddp": lambda: cluster.cloudddp(*words, cwd=project),
        "open": lambda: transfer(runner, to / "open"),
        "warm": lambda: rsync(cluster, to / "warm", warm=True),
        "cold": lambda: rsync(cluster, to / "cold", warm=False),
    }


def check(to: Path, nodes: int, case: Case) -> None:
    """End the benchmark if files are missing."""
    for rank in range(nodes):
        found = [path.stat().st_size for path in (to / f"node{rank}" / "runs").glob("d*/*")]
        if found != [case.size] * case.files:
            raise SystemExit(f"{to}: node {rank} has {len(found)} files instead of {case.files}")


def processor_seconds() -> float:
    """Return those of this process and its children; the bench itself only waits, and looks for files."""
    both = (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    return sum(used.ru_utime + used.ru_stime for used in both)


def measure(
    cluster: Cluster, runner: Any, project: Path, to: Path, case: Case, turns: int
) -> dict[str, list[tuple[float, int, float]]]:
    """Return (seconds, bytes received by the laptop, processor seconds of its processes) of each turn, by contender."""
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in CONTENDERS}
    every = contenders(cluster, runner, project, to)
    shutil.rmtree(to, ignore_errors=True)
    fill(cluster, case)
    if case.change is not None:
        for start in every.values():
            start()
    for turn in range(turns):
        if case.change is None and turn:
            fill(cluster, case)
        for name in CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]:
            before, used, began = traffic.received(), processor_seconds(), time.perf_counter()
            every[name]()
            seconds = time.perf_counter() - began
            found[name].append((seconds, traffic.received() - before, processor_seconds() - used))
            check(to / name, len(cluster.public), case)
            if case.change is None:
                shutil.rmtree(to / name)
    return found


def rows(cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int) -> Iterator[Row]:
    """Yield a row per case, number of nodes and round trip, as it is measured."""
    # Imported here because only this process, in the simulator's network, needs it.
    from cloudddp.cli import session
    from cloudddp.cli.console import Console
    from cloudddp.config.global_options import GlobalOptions

    link = Link()
    os.environ.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    memory = _MEMORY if Path(_MEMORY).is_dir() else None
    for count in nodes:
        with tempfile.TemporaryDirectory() as sockets, tempfile.TemporaryDirectory(dir=memory) as folder:
            link.be_near()
            cluster = Cluster(f"n{count}", count, Path(sockets))
            project = Path(sockets) / "project"
            project.mkdir()
            (project / "job.py").write_text("")
            cluster.cloudddp("launch", "job.py", cwd=project)
            os.environ.update(cluster.env)
            os.chdir(project)
            with session.start(Console(), GlobalOptions()).connect() as (_, runner):
                for name in cases:
                    for milliseconds in round_trips:
                        link.be_far(milliseconds, cluster, runner)
                        case = CASES[name]
                        done = measure(
                            cluster, runner, project, Path(folder) / "to", case, 1 if case.is_large else turns
                        )
                        yield {
                            "case": name,
                            "nodes": count,
                            "rtt": milliseconds,
                            "tcp": link.tcp,
                            "done": done,
                        }
            os.chdir("/")
            link.be_near()
            cluster.end()


# -- outside -----------------------------------------------------------------------------------------------


def bench(
    *, cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int, write: bool
) -> None:
    """Print a line per case, and with `write` put the table into docs/benchmarks.md."""
    print(f"pull: cloudddp and rsync in turns; a round trip of 50 ms has {MBIT} Mbit/s")
    columns = ("open / warm", "MB: open", "MB: warm", "CPU: open", "CPU: cold")
    report(
        "python -m bench pull", __file__, ["RTT", "nodes", "files", *CONTENDERS, *columns], _cells,
        cases=cases, nodes=nodes, round_trips=round_trips, turns=turns, write=write,
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    """Return a row as text. The ratio is the median of the turns' ratios."""
    done: dict[str, list[list[float]]] = row["done"]
    middle = {
        name: [statistics.median(turn[k] for turn in turns) for k in range(3)] for name, turns in done.items()
    }
    ratios = [ours[0] / other[0] for ours, other in zip(done["open"], done["warm"], strict=True)]
    return [
        f"{row['rtt']} ms",
        str(row["nodes"]),
        TITLES[row["case"]],
        *(f"{middle[name][0]:.2f} s" for name in CONTENDERS),
        f"{statistics.median(ratios):.2f}",
        *(f"{middle[name][1] / 1e6:.2f}" for name in ("open", "warm")),
        *(f"{middle[name][2]:.2f} s" for name in ("open", "cold")),
    ]


if __name__ == "__main__":
    print_rows(rows)
