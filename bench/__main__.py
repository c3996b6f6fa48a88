"""Measure cloudddp, compared with other programs where they are given.

    python -m bench                                  every benchmark, ours only
    python -m bench status launch                    some of them
    python -m bench help status --peers VENV         compared with torchx and flintrock
    python -m bench sync --peers                     compared with rsync (--cases, --nodes, --rtt, --turns)
    python -m bench pull                             always compared with rsync; the same options

VENV is a virtual environment with torchx and flintrock:

    python -m venv VENV && VENV/bin/pip install torchx flintrock 'setuptools<81'

Without it the rows of the peers are left out. Whole processes are timed in turns after one warm-up, and
medians are printed with minimum and maximum. The trainer has benchmarks of its own:
python -m bench.train.bench.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.faults.run import bench_faults
from bench.harness import Options
from bench.lab import bench_lab
from bench.launch import bench_launch
from bench.link import bench_link
from bench.machines import bench_machines
from bench.pull import bench_pull
from bench.recovery import bench_recovery
from bench.report import bench_report
from bench.scale import bench_scale
from bench.sync import bench_sync
from bench.top import bench_top
from bench.verbs import bench_help, bench_status

BENCHES: dict[str, Callable[[Options], None]] = {
    "help": bench_help,
    "status": bench_status,
    "sync": bench_sync,
    "pull": bench_pull,
    "lab": bench_lab,
    "report": bench_report,
    "launch": bench_launch,
    "scale": bench_scale,
    "top": bench_top,
    "link": bench_link,
    "machines": bench_machines,
    "faults": bench_faults,
    "recovery": bench_recovery,
}


def _environment(text: str) -> Path:
    folder = Path(text)
    if not any((folder / "bin" / program).is_file() for program in ("torchx", "flintrock")):
        raise argparse.ArgumentTypeError(f"{text}: not a virtual environment with torchx or flintrock")
    return folder


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="benchmarks:\n" + "".join(f"  {name:<10}{run.__doc__}\n" for name, run in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", choices=[[], *BENCHES], metavar="NAME", help="default: all")
    peers = "of `help` and `status`: VENV (see above); of `sync`: no folder, compare with rsync"
    add("--peers", metavar="VENV", type=_environment, nargs="?", const=True, default=None, help=peers)
    cases = "of `sync`: 2000 20000 1gb unchanged changed; of `pull`: without the last"
    add("--cases", metavar="A,B", type=_texts, default=(), help=cases)
    nodes = "of `sync`: default 1,4,8; of `pull`: 1,4; of `scale`: 1 to 64"
    add("--nodes", metavar="N,N", type=_numbers, default=(), help=nodes)
    round_trips = "of `sync` and `pull`: round trips, default 0,50"
    add("--rtt", metavar="MS,MS", type=_numbers, default=(), help=round_trips)
    add("--turns", metavar="N", type=int, default=0, help="of `sync` and `pull`: default 3")
    add("--fault", metavar="TEXT", default="", help="of `faults`: only those whose name contains it")
    add("--seed", type=int, default=20261123, help="of `faults`: of its random moments")
    write = (
        "write the table into docs/, if it has one: not of `help`, `status`, `sync` without --peers, `lab`"
    )
    add("--write", action="store_true", help=write)
    return parser


def main() -> None:
    given = vars(_parser().parse_args())
    names, peers = given.pop("names"), given.pop("peers")
    options = Options(venv=peers if isinstance(peers, Path) else None, peers=peers is not None, **given)
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    for name in names or BENCHES:
        BENCHES[name](options)


if __name__ == "__main__":
    main()
