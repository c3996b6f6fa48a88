"""From the command to the first line of a rank, and to its end: `cloudddp launch`, and the same torchrun typed by hand.

Both run on the same two namespace nodes, in turns. By hand means one OpenSSH client per node, started at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.common import ROOT, line, replace_between, script, simulator

RUNS = 7
SCRIPT = "import torch.distributed as d\nd.init_process_group('gloo')\nprint('first line', flush=True)\nd.barrier()\n"


def rows(program: str, env: dict[str, str], folder: Path) -> Iterator[tuple[float, float, float, float]]:
    """Yield the seconds to the first line and to the end, of launch and by hand."""

    def sim(*words: str) -> str:
        command = [program, "--sim", *words]
        return subprocess.run(
            command, env=env, cwd=folder, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        ).stdout

    (folder / "first.py").write_text(SCRIPT)
    sim("up", "-n", "2", "-t", "g5.12xlarge")
    try:
        sim("launch", "--nproc-per-node", "2", "first.py")  # syncs, and warms the page cache
        (cluster,) = json.loads(sim("status", "--json"))
        nodes = cluster["nodes"]
        head = nodes[0]["private_ip"]
        for number in range(RUNS):
            launched = _first_line(
                [[program, "--sim", "launch", "--nproc-per-node", "2", "first.py"]], env, folder
            )
            by_hand = [
                _by_hand(
                    program, env, one["public_ip"], _torchrun(head, one["private_ip"], rank, 29600 + number)
                )
                for rank, one in enumerate(nodes)
            ]
            yield *launched, *_first_line(by_hand, env, folder, begins=True)
    finally:
        sim("down", "-y")


def _first_line(
    commands: list[list[str]], env: dict[str, str], folder: Path, *, begins: bool = False
) -> tuple[float, float]:
    """Return the seconds until any of the commands has written the first line, and until all have ended. With `begins`, from
    when all of them have written that they begin: `sim exec`, which they need here, is no part of them."""
    log = folder / "output"
    with log.open("wb") as output:
        started = [
            subprocess.Popen(
                one, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            for one in commands
        ]
        began = time.perf_counter()
        ready = not begins
        while b"first line" not in (text := log.read_bytes()):
            if not ready and text.count(b"begin\n") == len(commands):
                ready, began = True, time.perf_counter()
            if all(one.poll() is not None for one in started) or time.perf_counter() - began > 120:
                raise RuntimeError(log.read_text())
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        for one in started:
            one.wait(timeout=120)
        ended = time.perf_counter() - began
    return seconds, ended


def _by_hand(program: str, env: dict[str, str], address: str, command: str) -> list[str]:
    """Return the OpenSSH command for a node, with the login key that `up` has made."""
    (key,) = Path(env["CLOUDDDP_HOME"]).glob("clusters/*/id_ed25519")
    ssh = ["ssh", "-F", "none", "-i", str(key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
           "-o", "LogLevel=ERROR", f"ubuntu@{address}", command]  # fmt: skip
    return [program, "sim", "exec", "--", "sh", "-c", 'echo begin; exec "$@"', "sh", *ssh]


def _torchrun(head: str, own: str, node: int, port: int) -> str:
    is_host = "true" if node == 0 else "false"
    return (
        "cd project && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=ens5 PYTHONUNBUFFERED=1 "
        f"/opt/pytorch/bin/python -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --local-addr={own} "
        f"--rdzv-backend=c10d --rdzv-id={port} --rdzv-endpoint={head}:{port} --rdzv-conf=is_host={is_host} first.py"
    )


def bench(*, write: bool) -> None:
    """Print the medians of both; exit with 1 if `launch` takes longer than the goal: 1.1 x by hand + 0.5 s."""
    print(
        "launch: 2 namespace nodes x 2 ranks, from the command to the first line of a rank and to its end, in turns"
    )
    load = os.getloadavg()[0]
    with simulator("namespace") as (found, env), tempfile.TemporaryDirectory() as folder:
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}
        done = list(rows(script("cloudddp"), inside, Path(folder)))
    ours, ours_end, by_hand, by_hand_end = (list(row) for row in zip(*done, strict=True))
    table = ["| | median | minimum | maximum |", "|---|---|---|---|"]
    for title, launched, typed in (
        ("to the first line", ours, by_hand),
        ("to the end", ours_end, by_hand_end),
    ):
        ratios = [one / other for one, other in zip(launched, typed, strict=True)]
        for name, row, unit in (
            ("cloudddp launch", launched, " s"),
            ("by hand, one ssh per node", typed, " s"),
            ("ratio of a turn", ratios, ""),
        ):
            middle, low, high = statistics.median(row), min(row), max(row)
            line(f"  {title}: {name}", middle, low, high, unit.strip())
            cells = (f"{value:.2f}{unit}" for value in (middle, low, high))
            table.append(f"| {title}: {name} | {' | '.join(cells)} |")
    more = statistics.median(ours) - 1.1 * statistics.median(by_hand)
    where = (
        f"{RUNS} turns, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load average "
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    print(f"  launch - 1.1 x by hand: {more:+.2f} s (goal: at most +0.5 s). {where}")
    if write:
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(replace_between(page.read_text(), "python -m bench launch", [where, "", *table]))
    if more > 0.5:
        raise SystemExit(1)
