"""A wide-area link between laptop and nodes: what round trips of 0, 20 and 100 ms cost, and whether paramiko is the limit.

`python -m bench link` starts a simulator and runs this file in its network with `cloudddp sim exec`. On 2 namespace nodes,
for each round trip, with 500 Mbit/s in each direction unless it is 0:

- seconds of `status`, `exec`, a sync of 2,000 x 4 KiB and of nothing, a `launch` with direct rendezvous, and `pull`;
- MB/s of one stream in each direction and processor seconds per GB, over paramiko and over OpenSSH's `ssh`.

A profile of an upload over paramiko says where its processor time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also run as a file

from bench.common import ROOT, replace_between, script, simulator
from bench.sync import change, fill
from bench.transfers import CASES, Cluster, Link
from cloudddp.ssh.running import CommandSpec

ROUND_TRIPS = (0, 20, 100)  # milliseconds
MBIT = 500  # the simulated link reaches about 650
TURNS = 3
SIZE = 128 << 20  # bytes of a stream
_PIECE = bytes(1 << 20)
_SCRIPT = "print('one line', flush=True)\n"


def used(who: int) -> float:
    found = resource.getrusage(who)
    return found.ru_utime + found.ru_stime


def verbs(cluster: Cluster, project: Path) -> dict[str, float]:
    """Return the median seconds of each verb."""
    steps: dict[str, tuple[Callable[[], object], Sequence[str]]] = {
        "status": (lambda: None, ["status"]),
        "exec": (lambda: None, ["exec", "--", "true"]),
        "sync, new": (lambda: cluster.everywhere("rm -rf project"), ["sync"]),
        "sync, unchanged": (lambda: None, ["sync"]),
        "launch": (lambda: change(project, 1), ["launch", "line.py"]),
        "pull": (lambda: None, ["pull", "--to", str(project.parent / "pulled"), "d1"]),
    }
    found = {}
    for name, (prepare, words) in steps.items():
        turns = []
        for _ in range(TURNS):
            prepare()
            began = time.perf_counter()
            cluster.cloudddp(*words, cwd=project)
            turns.append(time.perf_counter() - began)
        found[name] = statistics.median(turns)
    return found


def streams(cluster: Cluster, runner: Any, size: int) -> dict[str, tuple[float, float]]:
    """Return (MB/s, processor seconds per GB on the laptop) of each program and direction."""
    openssh = [*cluster.ssh(warm=True), f"ubuntu@{cluster.public[0]}"]
    pieces = size // len(_PIECE)

    def upload() -> None:
        runner.run(
            0, CommandSpec("cat > /dev/null", stdin=(_PIECE for _ in range(pieces)), command_timeout=None)
        )

    def download() -> None:
        runner.run(
            0, CommandSpec(f"head -c {size} /dev/zero", on_stdout=lambda _: None, command_timeout=None)
        )

    def openssh_upload() -> None:
        subprocess.run(
            ["sh", "-c", f'head -c {size} /dev/zero | "$@"', "sh", *openssh, "cat > /dev/null"], check=True
        )

    def openssh_download() -> None:
        subprocess.run([*openssh, f"head -c {size} /dev/zero"], check=True, stdout=subprocess.DEVNULL)

    found = {}
    for name, transfer, who in (
        ("paramiko, up", upload, resource.RUSAGE_SELF),
        ("OpenSSH, up", openssh_upload, None),
        ("paramiko, down", download, resource.RUSAGE_SELF),
        ("OpenSSH, down", openssh_download, None),
    ):
        before, began = used(who) if who is not None else 0.0, time.perf_counter()
        transfer()
        seconds = time.perf_counter() - began
        processor = (used(who) - before) / (size / 1e9) if who is not None else 0.0
        found[name] = (size / 1e6 / seconds, processor)
    return found


def profile(runner: Any) -> list[str]:
    """Return the functions in which the sending thread spends most of its time, of an upload at full speed."""
    recorder = cProfile.Profile()
    recorder.runcall(
        runner.run, 0, "cat > /dev/null", stdin=(_PIECE for _ in range(256)), command_timeout=None
    )
    found = pstats.Stats(recorder).get_stats_profile()
    total = found.total_tt
    most = sorted(found.func_profiles.items(), key=lambda item: -item[1].tottime)[:6]
    return [f"{_plain(name)} {one.tottime / total:.0%}" for name, one in most]


def _plain(name: str) -> str:
    """Return the profiler's name of a function without what is always the same: `<method 'send' of '_socket.socket'
    objects>`."""
    found = re.fullmatch(r"<(?:built-in )?method '?([\w.]+)'?(?: of '(?:[\w.]*\.)?(\w+)' objects)?>", name)
    return name if found is None else ".".join(part for part in (found[2], found[1]) if part)


def rows() -> Iterator[dict[str, Any]]:
    from cloudddp.cli import session
    from cloudddp.cli.console import Console
    from cloudddp.config.options import GlobalOptions

    link = Link()
    os.environ.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "files"
        fill(project, CASES["2000"])
        (project / "line.py").write_text(_SCRIPT)
        cluster = Cluster("link", 2, Path(folder))
        cluster.cloudddp("launch", "line.py", cwd=project)  # py-spy is there from now on
        os.environ.update(cluster.env)
        os.chdir(project)
        with session.start(Console(), GlobalOptions()).connect() as (_, runner):
            for milliseconds in ROUND_TRIPS:
                link.be_far(milliseconds, cluster, runner, mbit=MBIT)
                yield {
                    "rtt": milliseconds,
                    "tcp": link.tcp,
                    "verbs": verbs(cluster, project),
                    "streams": streams(cluster, runner, SIZE if milliseconds else 4 * SIZE),
                    "profile": [] if milliseconds else profile(runner),
                }
        os.chdir("/")
        link.be_near()
        cluster.end()


def bench(*, write: bool) -> None:
    """Print both tables and the profile, and with `write` put them into docs/benchmarks.md."""
    print(
        f"link: round trips of {', '.join(map(str, ROUND_TRIPS))} ms, {MBIT} Mbit/s where it is not 0; medians of {TURNS}"
    )
    load = os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    with simulator("namespace") as (sim, env):
        inside = {**env, "CLOUDDDP_HOME": str(sim.home), "PYTHONPATH": str(ROOT)}
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, str(Path(__file__))]
        with subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, text=True) as process:
            for text in process.stdout or ():
                found.append(json.loads(text))
                print(f"  {text.rstrip()}", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)
    names = list(found[0]["verbs"])
    table = [f"| round trip | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for row in found:
        cells = [f"{row['verbs'][name]:.2f} s" for name in names]
        table.append(f"| {row['rtt']} ms | {' | '.join(cells)} |")
    names = list(found[0]["streams"])
    table += ["", f"| round trip | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    table += [
        f"| {row['rtt']} ms | {' | '.join(_rate(*row['streams'][name]) for name in names)} |" for row in found
    ]
    where = (
        f"medians of {TURNS} turns, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, {found[0]['tcp']}, "
        f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    shares = f"Sending thread of an upload over paramiko at 0 ms, own time: {'; '.join(found[0]['profile'])}."
    print("\n".join([*table, where, shares]))
    if write:
        page = ROOT / "docs" / "benchmarks.md"
        lines = [where, "", *table, "", shares]
        page.write_text(replace_between(page.read_text(), "python -m bench link", lines))


def _rate(rate: float, processor: float) -> str:
    return f"{rate:.0f} MB/s" + (f", {processor:.1f} s per GB" if processor else "")


def main() -> None:
    """In the simulator's network: print a line of JSON per round trip."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for row in rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
