"""A wide-area link between laptop and nodes: what round trips cost, and whether paramiko is the limit.

On 2 namespace nodes, for each round trip, with 500 Mbit/s in each direction unless it is 0:

- seconds of `status`, `exec`, a sync of 2,000 x 4 KiB and of nothing, a `launch` with direct rendezvous, and
  `pull`;
- MB/s of one stream in each direction over paramiko and over OpenSSH's `ssh`, and processor seconds per GB of
  paramiko.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cluster import DIRECT, Cluster, Link
from bench.harness import Options, rows_inside, seconds_of
from bench.sync import fill
from bench.tables import BENCHMARKS, conditions, load, table, write_between
from bench.transfers import CASES, change_files

ROUND_TRIPS = (0, 20, 100)  # milliseconds
MBIT = 500  # the simulated link reaches about 650
TURNS = 3
SIZE = 128 << 20  # bytes of a stream
_PIECE = bytes(1 << 20)


def verbs(cluster: Cluster, pulled: Path) -> dict[str, float]:
    """Return the median seconds of each verb."""
    steps: dict[str, tuple[Callable[[], object], Sequence[str]]] = {
        "status": (lambda: None, ["status"]),
        "exec": (lambda: None, ["exec", "--", "true"]),
        "sync, new": (lambda: cluster.everywhere("rm -rf project"), ["sync"]),
        "sync, unchanged": (lambda: None, ["sync"]),
        "launch": (lambda: change_files(cluster.folder, 1), ["launch", "line.py"]),
        "pull": (lambda: None, ["pull", "--to", str(pulled), "d1"]),
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name, (prepare, words) in steps.items():
        for _ in range(TURNS):
            prepare()
            found[name].append(seconds_of(lambda words=words: cluster.cloudddp(*words)))  # type: ignore[misc]
    return {name: statistics.median(turns) for name, turns in found.items()}


def streams(cluster: Cluster, runner: Any, size: int) -> dict[str, str]:
    """Return the MB/s of each program and direction, and for paramiko the processor seconds per GB on the
    laptop."""
    from cloudddp.ssh.running import CommandSpec

    pieces, openssh = size // len(_PIECE), cluster.ssh(0)
    source = f'head -c {size} /dev/zero | "$@"'
    upload = ["sh", "-c", source, "sh", *openssh, "cat > /dev/null"]
    download = [*openssh, f"head -c {size} /dev/zero"]

    def sent() -> Iterator[bytes]:
        return (_PIECE for _ in range(pieces))

    ways: dict[str, Callable[[], object]] = {
        "paramiko, up": lambda: runner.run(0, CommandSpec("cat > /dev/null", sent(), command_timeout=None)),
        "OpenSSH, up": lambda: subprocess.run(upload, check=True),
        "paramiko, down": lambda: runner.run(
            0, CommandSpec(f"head -c {size} /dev/zero", command_timeout=None, on_stdout=lambda _: None)
        ),
        "OpenSSH, down": lambda: subprocess.run(download, check=True, stdout=subprocess.DEVNULL),
    }
    found = {}
    for name, transfer in ways.items():
        before = _processor_seconds()
        rate = f"{size / 1e6 / seconds_of(transfer):.0f} MB/s"
        used = (_processor_seconds() - before) / (size / 1e9)
        found[name] = f"{rate}, {used:.1f} s per GB" if name.startswith("paramiko") else rate
    return found


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row per round trip. In the simulator's network."""
    link = Link()
    with tempfile.TemporaryDirectory() as folder, Cluster(2, Path(folder), **DIRECT) as cluster:
        fill(cluster.folder, CASES["2000"])
        (cluster.folder / "line.py").write_text("print('one line', flush=True)\n")
        cluster.cloudddp("launch", "line.py")  # py-spy is there from now on
        with cluster.opened() as opened:
            for milliseconds in ROUND_TRIPS:
                link.be_far(milliseconds, cluster, opened.runner, mbit=MBIT)
                yield {
                    "rtt": f"{milliseconds} ms",
                    "tcp": link.tcp,
                    "verbs": verbs(cluster, Path(folder) / "pulled"),
                    "streams": streams(cluster, opened.runner, SIZE if milliseconds else 4 * SIZE),
                }
        link.be_near()


def bench_link(options: Options) -> None:
    """Verbs and streams over a link with round trips of 0, 20 and 100 ms."""
    print(f"link: round trips of {', '.join(map(str, ROUND_TRIPS))} ms, {MBIT} Mbit/s where it is not 0")
    before, found = load(), []
    for row in rows_inside(rows):
        found.append(row)
        print(f"  {row}", flush=True)
    verb_rows = [[row["rtt"], *(f"{seconds:.2f} s" for seconds in row["verbs"].values())] for row in found]
    stream_rows = [[row["rtt"], *row["streams"].values()] for row in found]
    lines = [
        f"medians of {TURNS} turns, {found[0]['tcp']}, {conditions(before)}",
        "",
        *table(["round trip", *found[0]["verbs"]], verb_rows),
        "",
        *table(["round trip", *found[0]["streams"]], stream_rows),
    ]
    print("\n".join(lines))
    if options.write:
        write_between(BENCHMARKS, "python -m bench link", lines)
