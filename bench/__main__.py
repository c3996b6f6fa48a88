"""Measure cloudddp and its example trainer, compared with other programs where they are given.

    python -m bench                                              every benchmark, ours only
    python -m bench models                                       one of them: help status models up sync pull window logs lab routes launch scale link faults recovery training trainer
    python -m bench help status --peers VENV                     compared with torchx and flintrock
    python -m bench trainer --peers EXAMPLES                     compared with pytorch/examples
    python -m bench sync --peers                                 compared with rsync (--cases, --nodes, --rtt, --turns)
    python -m bench pull                                         always compared with rsync; the same options

--peers names a folder with the programs to compare with. It may be given twice, and is one of two things:

    VENV      a virtual environment with torchx and flintrock, for `help` and `status`
              (python -m venv VENV && VENV/bin/pip install torchx flintrock 'setuptools<81')
    EXAMPLES  a checkout of github.com/pytorch/examples, for `trainer`

Without them the rows of the peers are left out. Whole processes are timed in turns (ours, theirs, ours, ...) after one
warm-up, and medians are printed with minimum and maximum. docs/benchmarks.md has the measurements of the trainer.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.common import ROOT, compare, environment, line, script, simulator, timed


@dataclass(frozen=True, kw_only=True)
class Options:
    """`venv` and `examples` are the folders given with --peers, by kind."""

    venv: Path | None = None
    examples: Path | None = None
    fault: str = ""
    write: bool = False
    seed: int = 0
    peers: bool = False
    cases: Sequence[str] = ()
    nodes: Sequence[int] = ()
    rtt: Sequence[int] = ()
    turns: int = 0


def find_peers(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by kind. Exits with code 2 for a folder that is neither."""
    found: dict[str, Path] = {}
    for folder in folders:
        if any((folder / "bin" / program).is_file() for program in ("torchx", "flintrock")):
            found["venv"] = folder
        elif (folder / "imagenet" / "main.py").is_file():
            found["examples"] = folder
        else:
            print(
                f"bench: --peers {folder}: neither a virtual environment with torchx or flintrock nor a checkout of "
                "pytorch/examples",
                file=sys.stderr,
            )
            raise SystemExit(2)
    return found


def bench_help(options: Options) -> None:
    """`cloudddp --help`, compared with `torchx --help`."""
    print("help: whole process")
    theirs = [str(options.venv / "bin" / "torchx"), "--help"] if options.venv else None
    compare([script("cloudddp"), "--help"], theirs, environment("/nonexistent"))


def bench_status(options: Options) -> None:
    """`cloudddp status` of 2 nodes on the simulator, compared with `flintrock describe`."""
    print("status: whole process, 2 nodes on the simulator")
    with simulator() as (_, env):
        subprocess.run([script("cloudddp"), "up", "-y", "-n", "2"], env=env, check=True, capture_output=True)
        region = ["--ec2-region", "us-east-1"]
        theirs = [str(options.venv / "bin" / "flintrock"), "describe", *region] if options.venv else None
        compare([script("cloudddp"), "status"], theirs, env)


def bench_models(_: Options) -> None:
    """`cloudddp status` with our loader of botocore's service models against botocore's own loader."""
    print(
        "models: `cloudddp status`, 2 nodes on the simulator; our loader of service models, then botocore's"
    )
    with simulator() as (_found, env):
        subprocess.run([script("cloudddp"), "up", "-y", "-n", "2"], env=env, check=True, capture_output=True)
        ours, stock = (
            [sys.executable, "-m", module, "status"] for module in ("cloudddp", "bench.stock_loader")
        )
        compare(ours, stock, env)


def bench_up(_: Options) -> None:
    """`up` of 8 simulated nodes: in total, and from the moment when every node responds."""
    print("up: 8 simulated nodes, in this process")
    whole, after = [], []
    with simulator() as (found, env):
        os.environ.update(env)
        for run in range(4):
            times = _one_up(found, f"bench{run}")
            if run:
                whole.append(times[0])
                after.append(times[1])
    line("  up, from the call until ready", statistics.median(whole), min(whole), max(whole), "s")
    line("  of it, after every node responds", statistics.median(after), min(after), max(after), "s")


def _one_up(found: Any, name: str) -> tuple[float, float]:
    from cloudddp.aws import inventory
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import teardown, up
    from cloudddp.config.spec import ClusterSpec
    from cloudddp.errors import Text

    spec = ClusterSpec(name=name, nodes=8, ssh_port=found.ssh_port)
    aws = AWS(region=found.region)
    responding: list[float] = []

    def progress(text: Text) -> None:
        if str(text).startswith("waiting for SSH"):  # printed when EC2 reports every node as running
            responding.append(time.perf_counter())

    started = time.perf_counter()
    up.up([aws], spec, progress=progress)
    ready = time.perf_counter()
    teardown.down(aws, inventory.named(name), progress=lambda _: None)
    return ready - started, ready - responding[0]


def bench_sync(options: Options) -> None:
    """Sync of 2,000 files to one simulated node: commands and seconds; with --peers, compared with rsync."""
    if options.peers:
        from bench import sync as peers
        from bench.transfers import CASES

        peers.bench(
            cases=options.cases or tuple(CASES),
            nodes=options.nodes or peers.NODES,
            round_trips=options.rtt or peers.ROUND_TRIPS,
            turns=options.turns or peers.TURNS,
            write=options.write,
        )
        return
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import connect, up
    from cloudddp.config.spec import ClusterSpec, Config
    from cloudddp.job import sync
    from cloudddp.job.project_files import of_config
    from cloudddp.ssh.connection import Connection
    from cloudddp.ssh.fleet import Fleet

    print("sync: 2,000 files of 4 KiB to one simulated node")
    commands: list[str] = []

    start = Connection.start

    def count(connection: Connection, command: str, *args: Any, **more: Any) -> Any:
        commands.append(command)
        return start(connection, command, *args, **more)

    with simulator() as (found, env), tempfile.TemporaryDirectory() as folder:
        os.environ.update(env)
        for k in range(2000):
            path = Path(folder) / f"d{k % 40}" / f"f{k}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(4096))
        spec = ClusterSpec(name="bench", nodes=1, ssh_port=found.ssh_port)
        aws = AWS(region=found.region)
        made = up.up([aws], spec, progress=lambda _: None).cluster
        with Fleet(connect.targets(made, spec)[0]) as fleet, mock.patch.object(Connection, "start", count):
            fleet.connect()
            for name in ("first", "unchanged"):
                commands.clear()
                started = time.perf_counter()
                sync.sync(
                    fleet,
                    made,
                    Config(cluster=spec),
                    files=of_config(Path(folder), Config(cluster=spec)),
                    progress=lambda _: None,
                )
                seconds = time.perf_counter() - started
                print(f"  {name:<12} {len(commands)} commands, {seconds:.3f} s", flush=True)


def bench_pull(options: Options) -> None:
    """Pull from simulated nodes, compared with rsync."""
    from bench import pull

    pull.bench(
        cases=options.cases or pull.PULLED,
        nodes=options.nodes or pull.NODES,
        round_trips=options.rtt or pull.ROUND_TRIPS,
        turns=options.turns or pull.TURNS,
        write=options.write,
    )


def bench_window(_: Options) -> None:
    """A stream from OpenSSH at a round trip of 100 ms, with paramiko's window and with ours."""
    from bench import window

    print(f"window: {window.SIZE >> 20} MiB from sshd, through a proxy with a round trip of 100 ms")
    for size, row in window.rates(5).items():
        line(f"  window of {size >> 20} MiB", statistics.median(row), min(row), max(row), "MB/s")


def bench_logs(_: Options) -> None:
    """Lines per second that a rank can write, into a plain file and under the agent's wrapper; and of `launch`."""
    from bench import logs

    print(f"logs: one rank, lines of 28 bytes, {logs.RUNS} runs in turns")
    for name, (code, lines) in logs.CODES.items():
        for how, row in logs.rates(code, lines).items():
            thousands = [rate / 1e3 for rate in row]
            low, high = min(thousands), max(thousands)
            line(f"  {name}, {how}", statistics.median(thousands), low, high, "k")
    with simulator() as (_found, env), tempfile.TemporaryDirectory() as folder:
        own = {**env, "CLOUDDDP_YES": "1", "CLOUDDDP_RENDEZVOUS": "direct", "CLOUDDDP_NPROC_PER_NODE": "1"}
        subprocess.run([script("cloudddp"), "up", "-n", "1"], env=own, check=True, capture_output=True)
        code, lines = logs.CODES["a line per write"]
        (Path(folder) / "lines.py").write_text(code)
        started = time.perf_counter()
        command = [script("cloudddp"), "launch", "-e", "BENCH_RESULT=/dev/null", "lines.py"]
        done = subprocess.run(command, env=own, cwd=folder, check=True, capture_output=True)
        seconds = time.perf_counter() - started
        count = done.stdout.count(b"\n")
        print(f"  launch: {count} of {lines} lines printed in {seconds:.1f} s, from the command to its end")


def bench_lab(_: Options) -> None:
    """Namespace nodes: from RunInstances until SSH responds on all, and from TerminateInstances until all are gone."""
    from bench import lab

    print("lab: namespace nodes, plain boto3; in brackets the load average before and after")
    with simulator("namespace") as (found, env):
        before = os.getloadavg()[0]
        inside = {**env, "CLOUDDDP_HOME": str(found.home)}
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, str(Path(lab.__file__))]
        output = subprocess.run(command, env=inside, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(text) for text in output.splitlines()]
    for size in lab.SIZES:
        for key, name in (("ssh", "until SSH responds on all"), ("gone", "until all are terminated")):
            seconds = [row[key] for row in rows if row["nodes"] == size]
            line(f"  {size:2} nodes, {name}", statistics.median(seconds), min(seconds), max(seconds), "s")
    print(f"  [{before:.1f}, {os.getloadavg()[0]:.1f}]")


def bench_routes(_: Options) -> None:
    """SSH to a namespace node: directly, through a jump host, by proxy commands."""
    from bench import routes

    print(f"routes: one connection to a namespace node, {routes.BYTES >> 20} MiB each way")
    with simulator("namespace") as (found, env):
        inside = {**env, "CLOUDDDP_HOME": str(found.home)}
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, str(Path(routes.__file__))]
        output = subprocess.run(command, env=inside, check=True, capture_output=True, text=True).stdout
    for row in map(json.loads, output.splitlines()):
        print(
            f"  {row['route']:<12} connect {row['open'] * 1e3:.0f} ms, command {row['command'] * 1e3:.1f} ms, "
            f"to the node {row['sent'] / 1e6:.0f} MB/s, from it {row['received'] / 1e6:.0f} MB/s"
        )


def bench_launch(options: Options) -> None:
    """From the command to the first line of a rank: `launch`, and the same torchrun typed by hand on both nodes."""
    from bench import first_line

    first_line.bench(write=options.write)


def bench_scale(options: Options) -> None:
    """What a node more costs: up, launch, exec and down of 1 to 64 nodes, and more without hosts."""
    from bench import scale

    scale.bench(nodes=options.nodes or scale.NODES, write=options.write)


def bench_link(options: Options) -> None:
    """Verbs and streams over a link with round trips of 0, 20 and 100 ms."""
    from bench import link

    link.bench(write=options.write)


def bench_faults(options: Options) -> None:
    """Every fault of a job, in the foreground and detached (--fault TEXT: those whose name contains it)."""
    from bench import faults

    faults.bench(options.fault, write=options.write, seed=options.seed)


def bench_recovery(options: Options) -> None:
    """From the loss of a node to the next training step, in parts, with `cloudddp watch`."""
    from bench import recovery

    recovery.bench(write=options.write)


def bench_training(_: Options) -> None:
    """`cloudddp launch` of a small DDP training on 2 namespace nodes with 2 ranks each, compared with plain torchrun."""
    print("training: 2 namespace nodes x 2 ranks, gloo, 200 steps of a small model; `cloudddp launch`")
    with simulator("namespace") as (found, env), tempfile.TemporaryDirectory() as folder:
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}
        shutil.copy(Path(__file__).with_name("gloo.py"), Path(folder) / "gloo.py")

        def ours(*words: str) -> float:
            started = time.perf_counter()
            command = [script("cloudddp"), "--sim", *words]
            done = subprocess.run(
                command, env=inside, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(
                    f"cloudddp {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
                )
            return time.perf_counter() - started

        ours("up", "-n", "2", "-t", "g5.12xlarge")
        # The same four ranks without nodes: the difference is the cost of the launcher and the simulator.
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


def bench_trainer(options: Options) -> None:
    """Training steps of `train/` (`python -m bench.train.bench`), compared with pytorch/examples."""
    print("trainer: samples per second, one process")
    given = ["--peers", str(options.examples.resolve())] if options.examples else []
    done = subprocess.run([sys.executable, "-m", "bench.train.bench", *given], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


BENCHES: dict[str, Callable[[Options], None]] = {
    "help": bench_help,
    "status": bench_status,
    "models": bench_models,
    "up": bench_up,
    "sync": bench_sync,
    "pull": bench_pull,
    "window": bench_window,
    "logs": bench_logs,
    "lab": bench_lab,
    "routes": bench_routes,
    "launch": bench_launch,
    "scale": bench_scale,
    "link": bench_link,
    "faults": bench_faults,
    "recovery": bench_recovery,
    "training": bench_training,
    "trainer": bench_trainer,
}


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="benchmarks:\n" + "".join(f"  {name:<10}{run.__doc__}\n" for name, run in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[[], *BENCHES], metavar="NAME", help="default: all")
    parser.add_argument(
        "--peers",
        metavar="DIR",
        type=Path,
        action="append",
        nargs="?",
        const=None,
        default=[],
        help="a virtual environment with torchx and flintrock, or a checkout of pytorch/examples (see above); of `sync`: none",
    )
    parser.add_argument(
        "--cases",
        metavar="A,B",
        type=_texts,
        default=(),
        help="of `sync`: 2000 20000 1gb unchanged changed; of `pull`: without the last",
    )
    parser.add_argument(
        "--nodes",
        metavar="N,N",
        type=_numbers,
        default=(),
        help="of `sync`: default 1,4,8; of `pull`: 1,4; of `scale`: 1 to 64",
    )
    parser.add_argument(
        "--rtt",
        metavar="MS,MS",
        type=_numbers,
        default=(),
        help="of `sync` and `pull`: round trips, default 0,50",
    )
    parser.add_argument("--turns", metavar="N", type=int, default=0, help="of `sync` and `pull`: default 3")
    parser.add_argument(
        "--fault", metavar="TEXT", default="", help="of `faults`: only those whose name contains it"
    )
    parser.add_argument("--seed", type=int, default=20261123, help="of `faults`: of its random moments")
    parser.add_argument(
        "--write",
        action="store_true",
        help="of `faults`, `recovery`, `launch`, `scale`, `pull` and `sync --peers`: write their tables into docs/",
    )
    given = parser.parse_args()
    options = Options(
        **find_peers([folder for folder in given.peers if folder]),
        fault=given.fault,
        write=given.write,
        seed=given.seed,
        peers=bool(given.peers),
        cases=given.cases,
        nodes=given.nodes,
        rtt=given.rtt,
        turns=given.turns,
    )
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    for name in given.names or BENCHES:
        BENCHES[name](options)


if __name__ == "__main__":
    main()
