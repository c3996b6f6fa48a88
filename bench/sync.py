"""`cloudddp sync` side by side with rsync, on namespace nodes: seconds, and bytes that the laptop sent.

`python -m bench sync --peers` starts a simulator and runs this file in its network with `cloudddp sim exec`. Contenders, each
with a folder of its own on every node, in turns:

    open       the transfer of `cloudddp sync`, in this process, over connections that are open
    cloudddp   the whole command, which starts Python, asks AWS and connects
    warm       one `rsync -a --delete` per node in parallel, over OpenSSH connections that are open (ControlMaster)
    cold       the same, each over a connection of its own
    relay      one rsync to node 0, then from there one per other node in parallel; all connections are open

Where a case sends files, each turn has new random files, and every contender starts from new nodes: empty folders, and no
records of an earlier sync. The files are in the page cache and the nodes' disks are memory, so that neither side waits for a
disk.
"""

from __future__ import annotations

import os
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
from bench.transfers import CASES, MBIT, TITLES, Case, Cluster, Link, Row, print_rows, report, run, together

NODES = (1, 4, 8)
ROUND_TRIPS = (0, 50)  # milliseconds
TURNS = 3
CONTENDERS = ("open", "cloudddp", "warm", "cold", "relay")
# What cloudddp has recorded on a node about the files of an earlier sync.
_RECORDS = " ".join(
    f".cloudddp/{name}-project.json" for name in ("manifest", "digests", "pending", "partial")
)


# -- in the simulator's network ----------------------------------------------------------------------------


def rsync(cluster: Cluster, source: Path, folder: str, *, warm: bool, nodes: int) -> None:
    shell = " ".join(cluster.ssh(warm=warm))
    addresses = cluster.public[:nodes]
    together(
        [
            ["rsync", "-a", "--delete", "-e", shell, f"{source}/", f"ubuntu@{one}:{folder}/"]
            for one in addresses
        ]
    )


def relay(cluster: Cluster, source: Path, folder: str) -> None:
    rsync(cluster, source, folder, warm=True, nodes=1)
    each = [f'rsync -a --delete -e "$s" {folder}/ {one}:{folder}/ & p="$p $!"' for one in cluster.private[1:]]
    if each:
        waiting = "for one in $p; do wait $one || exit 1; done"
        cluster.on(0, f"s='{cluster.from_node_0}'\n" + "\n".join([*each, waiting]))


def transfer(found: Any, runner: Any, settings: Any, source: Path) -> None:
    from cloudddp.job import sync
    from cloudddp.job.project_files import of_config

    sync.sync(runner, found, settings, files=of_config(source, settings), progress=lambda _text: None)


def contenders(
    cluster: Cluster, opened: tuple[Any, Any, Any], source: Path
) -> dict[str, tuple[str, Callable[[], object]]]:
    """Return each contender's folder on the nodes, and how it is run."""
    count = len(cluster.public)
    return {
        "open": ("project", lambda: transfer(*opened, source)),
        "cloudddp": ("project", lambda: cluster.cloudddp("sync", cwd=source)),
        "warm": ("rsync-warm", lambda: rsync(cluster, source, "rsync-warm", warm=True, nodes=count)),
        "cold": ("rsync-cold", lambda: rsync(cluster, source, "rsync-cold", warm=False, nodes=count)),
        "relay": ("rsync-relay", lambda: relay(cluster, source, "rsync-relay")),
    }


def fill(source: Path, case: Case) -> None:
    """Write new random files into a new folder."""
    shutil.rmtree(source, ignore_errors=True)
    for number in range(case.files):
        path = source / f"d{number % 40}" / f"f{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, case.size, 1 << 24):
                file.write(os.urandom(min(1 << 24, case.size - start)))


def change(source: Path, count: int) -> None:
    """Change files, each time in another second: rsync takes a file of the same size and second for unchanged."""
    for path in sorted(source.glob("d*/*"))[:count]:
        before = path.stat()
        path.write_bytes(os.urandom(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def check(cluster: Cluster, folder: str, source: Path, case: Case) -> None:
    """End the benchmark if a node lacks files, or has another version of the first one."""
    first = min(source.glob("d*/*"))
    names = f"find {folder} -type f | wc -l; sha256sum < {folder}/{first.relative_to(source)}"
    here = run(["sh", "-c", 'sha256sum < "$0"', str(first)])
    for rank, found in enumerate(cluster.everywhere(names)):
        if found != f"{case.files}\n{here}":
            raise SystemExit(f"node {rank} lacks files in {folder}: {found}")


def measure(
    cluster: Cluster,
    opened: tuple[Any, Any, Any],
    source: Path,
    case: Case,
    turns: int,
    names: Sequence[str],
) -> dict[str, list[tuple[float, int]]]:
    """Return (seconds, bytes sent by the laptop) of each turn, by contender."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    every = contenders(cluster, opened, source)
    folders = " ".join(folder for folder, _ in every.values())
    cluster.everywhere(f"rm -rf {folders} {_RECORDS}")
    fill(source, case)
    if case.change is not None:
        for _, start in every.values():
            start()
    for turn in range(turns):
        if case.change is None and turn:
            fill(source, case)
        order = [*names[turn % len(names) :], *names[: turn % len(names)]]
        for name in order:
            folder, start = every[name]
            if case.change:
                change(source, case.change)  # for each: two of them have the same folder
            before, began = traffic.sent(), time.perf_counter()
            start()
            seconds = time.perf_counter() - began
            found[name].append((seconds, traffic.sent() - before))
            check(cluster, folder, source, case)
            if case.change is None:
                cluster.everywhere(f"rm -rf {folder} {_RECORDS}")  # also makes room: the disks are memory
    return found


def rows(cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int) -> Iterator[Row]:
    """Yield a row per case, number of nodes and round trip, as it is measured."""
    # Imported here because only this process, in the simulator's network, needs it.
    from cloudddp.cli import session
    from cloudddp.cli.console import Console
    from cloudddp.config.global_options import GlobalOptions

    link = Link()
    for count in nodes:
        with tempfile.TemporaryDirectory(prefix="sync-") as folder:
            link.be_near()
            cluster = Cluster(f"n{count}", count, Path(folder))
            os.environ.update(cluster.env)
            started = session.start(Console(), GlobalOptions())
            with started.connect() as (found, runner):
                opened = (found, runner, started.settings)
                for name in cases:
                    for milliseconds in round_trips:
                        link.be_far(milliseconds, cluster, runner)
                        case = CASES[name]
                        done = measure(
                            cluster, opened, Path(folder) / "files", case,
                            1 if case.is_large else turns, taking_part(case, count, milliseconds),
                        )  # fmt: skip
                        yield {
                            "case": name,
                            "nodes": count,
                            "rtt": milliseconds,
                            "tcp": link.tcp,
                            "done": done,
                        }
            link.be_near()
            cluster.end()


def taking_part(case: Case, nodes: int, milliseconds: int) -> tuple[str, ...]:
    """Return the contenders. A copy of 1 GB for each of many nodes takes minutes over a narrow link: there, `relay` is the
    better rsync."""
    is_long = case.is_large and nodes > 1 and milliseconds
    return ("open", "cloudddp", "relay") if is_long else CONTENDERS


# -- outside -----------------------------------------------------------------------------------------------


def bench(
    *, cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int, write: bool
) -> None:
    """Print a line per case, and with `write` put the table into docs/benchmarks.md."""
    print(
        f"sync: cloudddp and rsync in turns; a round trip of 50 ms has {MBIT} Mbit/s; seconds, MB sent by the laptop"
    )
    head = ["RTT", "nodes", "files", *CONTENDERS, "open / better", "MB: open", "MB: warm", "MB: relay"]
    report(
        "python -m bench sync --peers", __file__, head, _cells,
        cases=cases, nodes=nodes, round_trips=round_trips, turns=turns, write=write,
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    """Return a row as text. The ratio is the median of the turns' ratios to the better one of `warm` and `relay`."""
    done: dict[str, list[list[float]]] = row["done"]
    seconds = {name: [turn[0] for turn in turns] for name, turns in done.items()}
    sent = {name: statistics.median(turn[1] for turn in turns) / 1e6 for name, turns in done.items()}
    rsyncs = [seconds[name] for name in ("warm", "relay") if name in seconds]
    better = [min(turn) for turn in zip(*rsyncs, strict=True)]
    ratios = [ours / other for ours, other in zip(seconds["open"], better, strict=True)]
    return [
        f"{row['rtt']} ms",
        str(row["nodes"]),
        TITLES[row["case"]],
        *(f"{statistics.median(seconds[name]):.2f} s" if name in seconds else "" for name in CONTENDERS),
        f"{statistics.median(ratios):.2f}",
        *(f"{sent[name]:.2f}" if name in sent else "" for name in ("open", "warm", "relay")),
    ]


if __name__ == "__main__":
    print_rows(rows)
