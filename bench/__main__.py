"""Measure cloudddp against the claims in its documentation, side by side with peers where they are installed.

    python -m bench [help status up sync] [--peers VENV]

`--peers` names an environment with torchx and flintrock (`pip install torchx flintrock 'setuptools<81'`); without it
the rows of the peers are left out. Whole processes are timed in turn (ours, theirs, ours, ...), after one warm-up,
and medians are printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUNS = 11


def timed(command: Sequence[str], env: dict[str, str]) -> float:
    """Return the wall seconds of one run, from start to exit."""
    began = time.perf_counter()
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    spent = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}")
    return spent


def compare(ours: Sequence[str], theirs: Sequence[str] | None, env: dict[str, str]) -> None:
    """Run two commands in turn and print the median of each and of the ratio pair by pair."""
    commands = [list(ours)] + ([list(theirs)] if theirs else [])
    rows: list[list[float]] = [[] for _ in commands]
    for run in range(RUNS + 1):
        for row, command in zip(rows, commands, strict=True):
            spent = timed(command, env)
            if run:
                row.append(spent)
    for row, command in zip(rows, commands, strict=True):
        name = " ".join([Path(command[0]).name, *command[1:]])
        line("  " + name, statistics.median(row), min(row), max(row), "s")
    if theirs:
        ratios = [a / b for a, b in zip(*rows, strict=True)]
        line("  ratio", statistics.median(ratios), min(ratios), max(ratios), "")


def line(name: str, middle: float, low: float, high: float, unit: str) -> None:
    print(f"{name:<52} {middle:8.3f} {unit:<2} ({low:.3f} to {high:.3f})", flush=True)


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def environment(home: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CLOUDDDP_"))}
    return {**kept, "CLOUDDDP_HOME": home}


@contextmanager
def simulator() -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield (a running simulator, the environment in which AWS clients and cloudddp use it)."""
    from cloudddp.sim import control

    with tempfile.TemporaryDirectory(prefix="cloudddp-bench-") as home:
        found = control.start(Path(home))
        try:
            yield found, {**environment(home), **control.environment(found)}
        finally:
            control.stop(Path(home))


def bench_help(peers: Path | None) -> None:
    """`cloudddp --help` against `torchx --help`."""
    print("help: whole process")
    theirs = [str(peers / "bin" / "torchx"), "--help"] if peers else None
    compare([script("cloudddp"), "--help"], theirs, environment("/nonexistent"))


def bench_status(peers: Path | None) -> None:
    """`cloudddp status` of 2 nodes against `flintrock describe`, both at the simulator."""
    print("status: whole process, 2 nodes on the simulator")
    with simulator() as (_, env):
        subprocess.run([script("cloudddp"), "up", "-y", "-n", "2"], env=env, check=True, capture_output=True)
        region = ["--ec2-region", "us-east-1"]
        theirs = [str(peers / "bin" / "flintrock"), "describe", *region] if peers else None
        compare([script("cloudddp"), "status"], theirs, env)


def bench_up(_: Path | None) -> None:
    """`up` of 8 simulated nodes: the whole command, and from the last node's first answer to ready."""
    print("up: 8 simulated nodes, in this process")
    whole, after = [], []
    with simulator() as (found, env):
        os.environ.update(env)
        for run in range(4):
            times = _one_up(found, f"bench{run}")
            if run:
                whole.append(times[0])
                after.append(times[1])
    line("  up, from the call to ready", statistics.median(whole), min(whole), max(whole), "s")
    line("  of it, after every node runs and answers", statistics.median(after), min(after), max(after), "s")


def _one_up(found: Any, name: str) -> tuple[float, float]:
    from cloudddp import teardown, up
    from cloudddp.aws import inventory
    from cloudddp.aws.client import AWS
    from cloudddp.spec import ClusterSpec

    spec = ClusterSpec(name=name, nodes=8, ssh_port=found.ssh_port)
    aws = AWS(region=found.region)
    answering: list[float] = []

    def say(text: str) -> None:
        if text.startswith("waiting for SSH"):  # said when EC2 shows every node running, and so answering
            answering.append(time.perf_counter())

    began = time.perf_counter()
    up.up(aws, spec, say=say)
    ready = time.perf_counter()
    teardown.down(aws, inventory.named(name), say=lambda _: None)
    return ready - began, ready - answering[0]


def bench_sync(_: Path | None) -> None:
    """A first and an unchanged sync of 2,000 files to one node: round trips and seconds."""
    from cloudddp import cluster, job, up
    from cloudddp.aws.client import AWS
    from cloudddp.spec import ClusterSpec, Config
    from cloudddp.ssh.connection import Result
    from cloudddp.ssh.fleet import Fleet

    print("sync: 2,000 files of 4 KiB to one simulated node")
    commands: list[str] = []

    class Counting(Fleet):
        def run(self, node: int, command: str, **rest: Any) -> Result:
            commands.append(command)
            return super().run(node, command, **rest)

    with simulator() as (found, env), tempfile.TemporaryDirectory() as folder:
        os.environ.update(env)
        for k in range(2000):
            path = Path(folder) / f"d{k % 40}" / f"f{k}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(4096))
        spec = ClusterSpec(name="bench", nodes=1, ssh_port=found.ssh_port)
        aws = AWS(region=found.region)
        made = up.up(aws, spec, say=lambda _: None).cluster
        with Counting(cluster.targets(made, spec)) as fleet:
            fleet.connect()
            for name in ("first", "unchanged"):
                commands.clear()
                began = time.perf_counter()
                job.sync_only(fleet, made, Config(cluster=spec), root=Path(folder), say=lambda _: None)
                spent = time.perf_counter() - began
                print(f"  {name:<12} {len(commands)} round trips, {spent:.3f} s", flush=True)


BENCHES: dict[str, Callable[[Path | None], None]] = {
    "help": bench_help,
    "status": bench_status,
    "up": bench_up,
    "sync": bench_sync,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *BENCHES], help="which (default: all)")
    parser.add_argument("--peers", type=Path, help="an environment with torchx and flintrock")
    options = parser.parse_args()
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    for name in options.names or BENCHES:
        BENCHES[name](options.peers)


if __name__ == "__main__":
    main()
