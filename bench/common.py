"""What several benchmarks need: whole processes timed in turns, and a simulator of their own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = 11


def timed(command: Sequence[str], env: dict[str, str]) -> float:
    """Return the wall seconds of one run, from start to exit."""
    started = time.perf_counter()
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}")
    return seconds


def compare(ours: Sequence[str], theirs: Sequence[str] | None, env: dict[str, str]) -> None:
    """Run two commands in turns and print the median of each, and of the ratio of each pair."""
    commands = [list(ours)] + ([list(theirs)] if theirs else [])
    rows: list[list[float]] = [[] for _ in commands]
    for run in range(RUNS + 1):
        for row, command in zip(rows, commands, strict=True):
            seconds = timed(command, env)
            if run:
                row.append(seconds)
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

    This process can reach nodes of kind `process`; `namespace` nodes are reachable only from what `cloudddp sim exec`
    runs.
    """
    from cloudddp.sim import control

    with tempfile.TemporaryDirectory(prefix="cloudddp-bench-") as home:
        found = control.start(Path(home), nodes=nodes)
        try:
            yield found, {**environment(home), **control.environment(found)}
        finally:
            control.stop(Path(home))


def replace_between(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a Markdown page with these lines between its comments `NAME: begin` and `NAME: end`."""
    begin, end = (f"<!-- {name}: {which} -->" for which in ("begin", "end"))
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the page has no {begin} ... {end}")
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])
