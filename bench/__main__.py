"""Measure cloudddp against the claims in its documentation, side by side with peers where they are installed.

    python -m bench [help status up sync lab training] [--peers VENV]

`--peers` names an environment with torchx and flintrock (`pip install torchx flintrock 'setuptools<81'`); without it
the rows of the peers are left out. Whole processes are timed in turn (ours, theirs, ours, ...), after one warm-up,
and medians are printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
def simulator(nodes: str = "process") -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield (a running simulator, the environment in which AWS clients and cloudddp use it).

    With nodes of kind `process`, the default, this very process reaches them; with `namespace` nodes only what
    `cloudddp sim exec` runs does.
    """
    from cloudddp.sim import control

    with tempfile.TemporaryDirectory(prefix="cloudddp-bench-") as home:
        found = control.start(Path(home), nodes=nodes)
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


def bench_lab(_: Path | None) -> None:
    """Nodes that are hosts of their own: from RunInstances to SSH on all, from TerminateInstances to all gone."""
    from bench import lab

    print("lab: namespace nodes, plain boto3; in brackets the load of this computer before and after")
    with simulator("namespace") as (found, env):
        before = os.getloadavg()[0]
        inside = {**env, "CLOUDDDP_HOME": str(found.home)}
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, str(Path(lab.__file__))]
        said = subprocess.run(command, env=inside, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(text) for text in said.splitlines()]
    for size in lab.SIZES:
        for key, name in (("ssh", "from the call to every SSH"), ("gone", "from the call to all terminated")):
            spent = [row[key] for row in rows if row["nodes"] == size]
            line(f"  {size:2} nodes, {name}", statistics.median(spent), min(spent), max(spent), "s")
    print(f"  [{before:.1f}, {os.getloadavg()[0]:.1f}]")


def bench_training(_: Path | None) -> None:
    """`cloudddp launch` of a small DDP training with gloo, 2 namespace nodes with 2 ranks each: the whole command."""
    print("training: 2 namespace nodes x 2 ranks, gloo, 200 steps of a small network; `cloudddp launch`")
    with simulator("namespace") as (found, env), tempfile.TemporaryDirectory() as folder:
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}
        shutil.copy(Path(__file__).with_name("gloo.py"), Path(folder) / "gloo.py")

        def ours(*words: str) -> float:
            began = time.perf_counter()
            command = [script("cloudddp"), "--sim", *words]
            done = subprocess.run(
                command, env=inside, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(
                    f"cloudddp {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
                )
            return time.perf_counter() - began

        ours("up", "-n", "2", "-t", "g5.12xlarge")
        # The same four ranks without nodes: what is left of the difference is the launcher's and the lab's.
        plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        rows = [
            (ours("launch", "--nproc-per-node", "2", "gloo.py"), timed([*plain, f"{folder}/gloo.py"], inside))
            for _ in range(3)
        ]
        ours("down")
    for name, row in zip(
        ("cloudddp launch", "torchrun with 4 ranks, no nodes"), zip(*rows, strict=True), strict=True
    ):
        line(f"  {name}", statistics.median(row), min(row), max(row), "s")
    ratios = [launched / alone for launched, alone in rows]
    line("  ratio", statistics.median(ratios), min(ratios), max(ratios), "")


BENCHES: dict[str, Callable[[Path | None], None]] = {
    "help": bench_help,
    "status": bench_status,
    "up": bench_up,
    "sync": bench_sync,
    "lab": bench_lab,
    "training": bench_training,
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
