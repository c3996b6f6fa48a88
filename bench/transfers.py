"""Transfers of files side by side with rsync, on namespace nodes: `sync` to them, and `pull` from them.

Contenders transfer the same files in turns, each into a folder of its own. Where a case sends files, each
turn has new random ones, and every contender starts from empty folders. The files are in the page cache and
the disks are memory, so that neither side waits for a disk.
"""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster import DIRECT, Cluster, Link, Opened
from bench.harness import Options, rotated, rows_inside
from bench.tables import BENCHMARKS, conditions, load, table, write_between

GB = 10**9
ROUND_TRIPS = (0, 50)  # milliseconds
TURNS = 3
_MEMORY = Path("/dev/shm")  # noqa: S108

# Case, nodes, rtt, tcp; done: (seconds, bytes, processor seconds) of each turn, by contender.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """`files` of `size` bytes; `change`: None sends all of them, else so many are changed before each run."""

    title: str
    files: int
    size: int
    change: int | None = None

    @property
    def is_large(self) -> bool:
        return self.files * self.size >= GB


CASES = {
    "2000": Case("2,000 x 4 KiB", 2_000, 4096),
    "20000": Case("20,000 x 4 KiB", 20_000, 4096),
    "1gb": Case("one file of 1 GB", 1, GB),
    "unchanged": Case("4,000 x 4 KiB, unchanged", 4_000, 4096, 0),
    "changed": Case("4,000 x 4 KiB, one changed", 4_000, 4096, 1),
}
# Writes random files into 40 folders below the current one; runs on the laptop and on nodes.
FILL = """
import os
for number in range({case.files}):
    os.makedirs(f"d{{number % 40}}", exist_ok=True)
    with open(f"d{{number % 40}}/f{{number}}.bin", "wb") as file:
        for start in range(0, {case.size}, 1 << 24):
            file.write(os.urandom(min(1 << 24, {case.size} - start)))
"""


class Transfer(ABC):
    """One direction. `start` has how each contender is run."""

    start: dict[str, Callable[[], object]]

    def __init__(self, cluster: Cluster, opened: Opened, memory: Path) -> None:
        """`memory` is a new folder for files on the laptop."""
        self.cluster, self.opened, self.memory = cluster, opened, memory

    def taking_part(self, _case: Case, _milliseconds: int) -> list[str]:
        """Return the contenders of a case."""
        return list(self.start)

    @abstractmethod
    def fill(self, case: Case) -> None:
        """Write new random files at the source."""

    def change(self, count: int) -> None:
        """Change some files at the source."""
        raise NotImplementedError

    @abstractmethod
    def clear(self, contender: str) -> None:
        """Remove what a contender has transferred. It also makes room: the disks are memory."""

    def prepare(self, _contender: str) -> None:
        """Bring about what a contender finds when its transfer begins."""
        return

    @abstractmethod
    def check(self, contender: str, case: Case) -> None:
        """End the benchmark if files have not arrived."""

    @abstractmethod
    def moved(self) -> int:
        """Return the bytes that the laptop has transferred so far."""


def processor_seconds() -> float:
    """Return those of this process and its children; the bench itself only waits, and looks for files."""
    both = (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    return sum(used.ru_utime + used.ru_stime for used in both)


def measure(
    transfer: Transfer, case: Case, turns: int, names: Sequence[str]
) -> dict[str, list[tuple[float, int, float]]]:
    """Return (seconds, bytes, processor seconds of the laptop's processes) of each turn, by contender."""
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in names}
    for name in transfer.start:
        transfer.clear(name)
    transfer.fill(case)
    if case.change is not None:
        for name in names:
            transfer.start[name]()
    for turn in range(turns):
        if case.change is None and turn:
            transfer.fill(case)
        for name in rotated(names, turn):
            if case.change:
                transfer.change(case.change)  # for each: two of them may have the same folder
            transfer.prepare(name)
            moved, used, began = transfer.moved(), processor_seconds(), time.perf_counter()
            transfer.start[name]()
            seconds = time.perf_counter() - began
            found[name].append((seconds, transfer.moved() - moved, processor_seconds() - used))
            transfer.check(name, case)
            if case.change is None:
                transfer.clear(name)
    return found


def rows(
    kind: str,
    cases: Sequence[str],
    nodes: Sequence[int],
    round_trips: Sequence[int],
    turns: int,
) -> Iterator[Row]:
    """Yield a row per case, number of nodes and round trip, as it is measured. In the simulator's network.

    `kind` is MODULE:CLASS of a Transfer.
    """
    module, _, name = kind.partition(":")
    transfer_class: type[Transfer] = getattr(importlib.import_module(module), name)
    link = Link()
    memory = _MEMORY if _MEMORY.is_dir() else None
    for count in nodes:
        link.be_near()
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir=memory) as files,
            Cluster(count, Path(folder), **DIRECT) as cluster,
        ):
            (cluster.folder / "job.py").write_text("")
            cluster.cloudddp("launch", "job.py")  # `pull` is that of a job
            with cluster.opened() as opened:
                transfer = transfer_class(cluster, opened, Path(files))
                for name in cases:
                    case = CASES[name]
                    for milliseconds in round_trips:
                        link.be_far(milliseconds, cluster, opened.runner)
                        names = transfer.taking_part(case, milliseconds)
                        done = measure(transfer, case, 1 if case.is_large else turns, names)
                        row = {"case": name, "nodes": count, "rtt": milliseconds}
                        yield {**row, "tcp": link.tcp, "done": done}
            link.be_near()


def report(
    name: str,
    kind: type[Transfer],
    head: Sequence[str],
    cells: Callable[[Row], list[str]],
    options: Options,
    *,
    cases: Sequence[str],
    nodes: Sequence[int],
) -> None:
    """Print a line per row of a transfer; with --write, put the table between the comments `name` of
    docs/benchmarks.md. `cases` and `nodes` are those without options."""
    head = ["RTT", "nodes", "files", *head]
    before, turns, tcp, body = load(), options.turns or TURNS, "", []
    print("  " + "  ".join(head))
    for row in rows_inside(
        rows,
        kind=f"{kind.__module__}:{kind.__name__}",
        cases=options.cases or cases,
        nodes=options.nodes or nodes,
        round_trips=options.rtt or ROUND_TRIPS,
        turns=turns,
    ):
        tcp = row["tcp"]
        body.append([f"{row['rtt']} ms", str(row["nodes"]), CASES[row["case"]].title, *cells(row)])
        print("  " + "  ".join(body[-1]), flush=True)
    where = f"medians of {turns} turns (1 of 1 GB), {tcp}, {conditions(before)}"
    print(f"  {where}")
    if options.write:
        write_between(BENCHMARKS, name, [where, "", *table(head, body)])


def medians(row: Row) -> dict[str, list[float]]:
    """Return the median seconds, bytes and processor seconds of each contender."""
    return {
        name: [statistics.median(part) for part in zip(*turns, strict=True)]
        for name, turns in row["done"].items()
    }


def seconds(row: Row, contender: str) -> list[float]:
    """Return the seconds of each turn."""
    return [turn[0] for turn in row["done"][contender]]


def change_files(source: Path, count: int) -> None:
    """Change files, each time in another second: rsync takes a file of the same size and second for
    unchanged."""
    for path in sorted(source.glob("d*/*"))[:count]:
        before = path.stat()
        path.write_bytes(os.urandom(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
