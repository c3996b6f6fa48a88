"""What a node more costs: `up`, a direct `launch`, `exec` and `down` of 1 to 64 namespace nodes, and more
without hosts.

Of each command: seconds; calls of the AWS API, counted by a proxy in front of it; bytes to and from the
nodes; and of its process, the largest number of threads and the peak of its memory, read from /proc every few
milliseconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.faults import FaultyEndpoint

from bench import traffic
from bench.cluster import DIRECT
from bench.harness import Options, rows_inside, script, simulator, start
from bench.tables import BENCHMARKS, conditions, load, table, write_between
from cloudddp.config.cluster_spec import MAX_NODES

NODES = (1, 2, 4, 8, 16, 32, 64)
API_NODES = min(256, MAX_NODES)  # without hosts
RUNS = 3  # of launch and exec; their medians
VERBS = ("up", "launch", "exec", "down")
_SAMPLE = 0.004  # seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one command. `kilobytes` are those to and from the nodes; 0 where there are none."""

    seconds: float
    calls: int
    kilobytes: float
    threads: int
    megabytes: float

    def __str__(self) -> str:
        moved = f", {self.kilobytes:.0f} kB" if self.kilobytes else ""
        process = f"{self.threads} threads, {self.megabytes:.0f} MB"
        return f"{self.seconds:.2f} s, {self.calls} calls{moved}, {process}"


class Measuring:
    """Runs commands of one cluster in a folder of its own. `proxy` counts their API calls."""

    def __init__(
        self, name: str, proxy: FaultyEndpoint, env: dict[str, str], folder: Path, *, hosts: bool
    ) -> None:
        self._env = {**env, "CLOUDDDP_CLUSTER": name, "AWS_ENDPOINT_URL": proxy.url, **DIRECT}
        self._proxy, self._folder, self._hosts = proxy, folder, hosts
        (folder / "line.py").write_text("print('one line')\n")

    def run(self, *words: str, until: str = "") -> Cost:
        """Run a command to its end; with `until`, to the first line with this text, at which it is killed."""
        calls, moved = len(self._proxy.calls), self._moved()
        threads, peak = 0, 0
        with tempfile.TemporaryFile() as output:
            began = time.perf_counter()
            command = [script("cloudddp"), *words]
            process = start(command, env=self._env, cwd=self._folder, stdout=output)
            stopped = False
            while process.poll() is None:
                threads, peak = map(max, zip((threads, peak), _threads_and_peak(process.pid), strict=True))
                if until and until.encode() in os.pread(output.fileno(), 1 << 20, 0):
                    stopped = True
                    process.kill()
                    process.wait()
                    break
                time.sleep(_SAMPLE)
            seconds = time.perf_counter() - began
            if process.returncode and not stopped:
                text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
                raise SystemExit(f"cloudddp {' '.join(words)}: exit {process.returncode}\n{text}")
        kilobytes = (self._moved() - moved) / 1e3
        return Cost(seconds, len(self._proxy.calls) - calls, kilobytes, threads, peak / 1e3)

    def _moved(self) -> int:
        return traffic.sent() + traffic.received() if self._hosts else 0

    def median(self, *words: str) -> Cost:
        """Return the medians of seconds and bytes of several runs, and the largest of what is a peak."""
        costs = [self.run(*words) for _ in range(RUNS)]
        return Cost(
            seconds=statistics.median(cost.seconds for cost in costs),
            calls=max(cost.calls for cost in costs),
            kilobytes=statistics.median(cost.kilobytes for cost in costs),
            threads=max(cost.threads for cost in costs),
            megabytes=max(cost.megabytes for cost in costs),
        )


@contextmanager
def measuring(name: str, env: dict[str, str], *, hosts: bool) -> Iterator[Measuring]:
    with (
        tempfile.TemporaryDirectory(prefix="scale-") as folder,
        FaultyEndpoint(env["AWS_ENDPOINT_URL"]) as proxy,
    ):
        yield Measuring(name, proxy, env, Path(folder), hosts=hosts)


def _threads_and_peak(pid: int) -> tuple[int, int]:
    """Return the number of threads, and the peak of the memory in kB; zeros for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    values = dict(line.split(":", 1) for line in text.splitlines())
    return int(values.get("Threads", "0")), int(values.get("VmHWM", "0 kB").split()[0])


def rows(nodes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per number of nodes. In the simulator's network."""
    traffic.count()
    for count in nodes:
        with measuring(f"n{count}", dict(os.environ), hosts=True) as cluster:
            up = cluster.run("up", "-n", str(count), "-t", "g5.xlarge")
            cluster.run("launch", "line.py")  # sends the script, and warms the page cache
            launch, execute = cluster.median("launch", "line.py"), cluster.median("exec", "--", "true")
            costs = (up, launch, execute, cluster.run("down"))
        yield {"nodes": count, **{verb: asdict(cost) for verb, cost in zip(VERBS, costs, strict=True)}}


def without_hosts(count: int) -> dict[str, Cost]:
    """Return the cost of `up` until it waits for SSH, `ls` and `down` of instances that run and never boot:
    nothing but the API is behind them."""
    with simulator(timing={"booting": 3600.0}) as env, measuring("many", env, hosts=False) as cluster:
        up = cluster.run("up", "-n", str(count), "-t", "g5.xlarge", until="waiting for SSH")
        return {"up until it waits for SSH": up, "ls": cluster.run("ls"), "down": cluster.run("down")}


def bench_scale(options: Options) -> None:
    """What a node more costs: up, launch, exec and down of 1 to 64 nodes, and more without hosts."""
    print("scale: seconds, AWS calls, kB over SSH, threads and MB of each command, on namespace nodes")
    before, cells = load(), []
    for row in rows_inside(rows, nodes=options.nodes or NODES):
        cells.append([str(row["nodes"]), *(str(Cost(**row[verb])) for verb in VERBS)])
        print("  " + "  |  ".join(cells[-1]), flush=True)
    api = [f"{verb}: {cost}" for verb, cost in without_hosts(API_NODES).items()]
    alone = f"{API_NODES} nodes without hosts: {'; '.join(api)}."
    where = conditions(before)
    print(f"  {alone}\n  {where}")
    if options.write:
        lines = table(["nodes", *(f"`{verb}`" for verb in VERBS)], cells)
        write_between(BENCHMARKS, "python -m bench scale", [where, "", *lines, "", alone])
