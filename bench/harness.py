"""The harness of the benchmarks: commands timed in turns, a simulator, and rows measured in its network.

A simulator with namespace nodes has a network of its own. A benchmark that connects to these nodes has a
function that yields rows; `rows_inside` runs it in a process in that network, this module.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.tables import line, ratios

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
RUNS = 11  # of each command that `compare` times


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. `venv` is the folder that --peers names, if any."""

    venv: Path | None = None
    peers: bool = False
    write: bool = False
    cases: Sequence[str] = ()
    nodes: Sequence[int] = ()
    rtt: Sequence[int] = ()
    turns: int = 0
    fault: str = ""
    seed: int = 0


# -- commands ------------------------------------------------------------------------------------------------


def script(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(Path(sys.executable).with_name(name))


def start(command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command without input; its errors are part of its output."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, text=True, **more)


def finished(command: Sequence[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input, and return how it ended."""
    none = subprocess.DEVNULL
    return subprocess.run(command, stdin=none, capture_output=True, text=True, check=False, **more)


def run(command: Sequence[str | Path], **more: Any) -> str:
    """Return the output of a command. Ends the benchmark if the command fails."""
    done = finished(command, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the sides in the order of a turn: each is the first one as often as the others."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def in_turns(sides: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Call each side once for warm-up, and then in turns. Return the results by side."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name in rotated(list(sides), turn):
            result = sides[name]()
            if turn:
                found[name].append(result)
    return found


def compare(commands: Sequence[Sequence[str]], env: dict[str, str]) -> None:
    """Time whole processes in turns and print the median of each, and of the ratio of the first two."""

    def side(command: Sequence[str]) -> Callable[[], float]:
        return lambda: seconds_of(lambda: run(command, env=env))

    named = {" ".join([Path(words[0]).name, *words[1:]]): side(words) for words in commands}
    rows = in_turns(named, RUNS)
    for name, row in rows.items():
        line(name, row, "s")
    if len(rows) > 1:
        line("ratio", ratios(*rows.values()))


# -- the simulator -------------------------------------------------------------------------------------------


def environment(home: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CLOUDDDP_"))}
    return {**kept, "CLOUDDDP_HOME": home}


@contextmanager
def simulator(nodes: str = "process", **settings: Any) -> Iterator[dict[str, str]]:
    """Yield the environment in which AWS clients and cloudddp use a new simulator; no command asks questions.

    This process can reach nodes of kind `process`; `namespace` nodes are reachable only from what `cloudddp
    sim exec` runs.
    """
    from cloudddp.simulator import control

    with tempfile.TemporaryDirectory(prefix="cloudddp-bench-") as home:
        found = control.start(Path(home), nodes=nodes, **settings)
        own = {"CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}
        try:
            yield {**environment(home), **control.environment(found), **own}
        finally:
            control.stop(Path(home))


def rows_inside(function: Callable[..., Iterator[Any]], **arguments: Any) -> Iterator[Any]:
    """Call a function of a module in the network of a new simulator; yield what it yields, at once.

    Arguments and rows pass as JSON.
    """
    where = f"{function.__module__}:{function.__name__}"
    task = [sys.executable, "-m", "bench.harness", where, json.dumps(arguments)]
    with simulator("namespace") as env:
        inside = {**env, "PYTHONPATH": str(ROOT)}
        command = [script("cloudddp"), "sim", "exec", "--", *task]
        with subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, text=True) as process:
            yield from map(json.loads, process.stdout or ())
    if process.returncode:
        raise SystemExit(process.returncode)


def _main() -> None:
    where, arguments = sys.argv[1:]
    module, _, name = where.partition(":")
    for row in getattr(importlib.import_module(module), name)(**json.loads(arguments)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    _main()
