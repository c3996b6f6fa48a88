"""Measure cloudddp and its example trainer, compared with other programs where they are given.

    python -m bench                                  every benchmark, ours only
    python -m bench status launch                    some of them
    python -m bench help status --peers VENV         compared with torchx and flintrock
    python -m bench trainer --peers EXAMPLES         compared with pytorch/examples
    python -m bench sync --peers                     compared with rsync (--cases, --nodes, --rtt, --turns)
    python -m bench pull                             always compared with rsync; the same options

--peers names a folder with the programs to compare with. It may be given twice, and is one of two things:

    VENV      a virtual environment with torchx and flintrock, for `help` and `status`
              (python -m venv VENV && VENV/bin/pip install torchx flintrock 'setuptools<81')
    EXAMPLES  a checkout of github.com/pytorch/examples, for `trainer`

Without them the rows of the peers are left out. Whole processes are timed in turns (ours, theirs, ours, ...) after one
warm-up, and medians are printed with minimum and maximum. docs/benchmarks.md has the measurements of the trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.faults.run import bench_faults
from bench.harness import Options
from bench.lab import bench_lab
from bench.launch import bench_launch
from bench.link import bench_link
from bench.pull import bench_pull
from bench.recovery import bench_recovery
from bench.scale import bench_scale
from bench.sync import bench_sync
from bench.trainer import bench_trainer
from bench.verbs import bench_help, bench_status

BENCHES: dict[str, Callable[[Options], None]] = {
    "help": bench_help,
    "status": bench_status,
    "sync": bench_sync,
    "pull": bench_pull,
    "lab": bench_lab,
    "launch": bench_launch,
    "scale": bench_scale,
    "link": bench_link,
    "faults": bench_faults,
    "recovery": bench_recovery,
    "trainer": bench_trainer,
}


def find_peers(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the folders by kind. Exits with code 2 for a folder that is neither."""
    found: dict[str, Any] = {}
    for folder in folders:
        if any((folder / "bin" / program).is_file() for program in ("torchx", "flintrock")):
            found["venv"] = folder
        elif (folder / "imagenet" / "main.py").is_file():
            found["examples"] = folder
        else:
            kinds = "a virtual environment with torchx or flintrock nor a checkout of pytorch/examples"
            print(f"bench: --peers {folder}: neither {kinds}", file=sys.stderr)
            raise SystemExit(2)
    return found


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
    peers = "programs to compare with (see above); of `sync`: no folder"
    add("--peers", metavar="DIR", type=Path, action="append", nargs="?", default=[], help=peers)
    cases = "of `sync`: 2000 20000 1gb unchanged changed; of `pull`: without the last"
    add("--cases", metavar="A,B", type=_texts, default=(), help=cases)
    nodes = "of `sync`: default 1,4,8; of `pull`: 1,4; of `scale`: 1 to 64"
    add("--nodes", metavar="N,N", type=_numbers, default=(), help=nodes)
    round_trips = "of `sync` and `pull`: round trips, default 0,50"
    add("--rtt", metavar="MS,MS", type=_numbers, default=(), help=round_trips)
    add("--turns", metavar="N", type=int, default=0, help="of `sync` and `pull`: default 3")
    add("--fault", metavar="TEXT", default="", help="of `faults`: only those whose name contains it")
    add("--seed", type=int, default=20261123, help="of `faults`: of its random moments")
    write = "of `faults`, `recovery`, `launch`, `scale`, `link`, `pull` and `sync --peers`: write their tables into docs/"
    add("--write", action="store_true", help=write)
    return parser


def main() -> None:
    given = vars(_parser().parse_args())
    names, peers = given.pop("names"), given.pop("peers")
    options = Options(**find_peers([folder for folder in peers if folder]), peers=bool(peers), **given)
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    for name in names or BENCHES:
        BENCHES[name](options)


if __name__ == "__main__":
    main()
