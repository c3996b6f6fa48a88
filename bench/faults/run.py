"""Faults of a job in the lab: what the commands say, how long the last rank lives, the exit code, and what is
left.

`python -m bench faults` runs a job of gloo into each fault, on clusters of 2 nodes x 2 ranks and 4 x 1 in the
simulator, in the foreground and detached with nobody connected. A second client, with a copy of the keys in
another folder, has to say the same as the first. With --write it puts its table into docs/faults.md.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.faults import document, laptop, measure
from bench.faults.cases import FAULTS
from bench.faults.lab import Lab
from bench.faults.measure import Row
from bench.harness import Options, simulator
from bench.tables import load, table


def bench_faults(options: Options) -> None:
    """Every fault of a job, in the foreground and detached (--fault TEXT: those whose name contains it)."""
    print("faults: gloo on namespace nodes; seconds from the fault to the last rank gone, and the exit code")
    before, done = load(), []
    for row in _rows(options.fault, options.seed):
        done.append(row)
        print(f"  {asdict(row)}", flush=True)
    print("\n".join(table(document.HEAD, document.cells(done))))
    print(f"load average {before:.1f} before, {load():.1f} after")
    if options.write:
        document.write(done, before)
    wrong = [one for one in done if one.problems]
    for one in wrong:
        how = "connected" if one.attached else "detached"
        print(f"NOT AS EXPECTED: {one.fault}, {one.shape}, {how}: {'; '.join(one.problems)}")
    if wrong:
        raise SystemExit(1)


def _rows(only: str, seed: int) -> Iterator[Row]:
    """Yield the rows of the faults whose name contains `only`."""
    chosen = [one for one in FAULTS if only in one.name]
    with simulator("namespace") as env, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(Path(__file__).with_name("script.py"), folder)
        yield from measure.rows(Lab(env, folder, 2, 2), chosen)
        yield from measure.rows(Lab(env, folder, 4, 1), [fault for fault in chosen if fault.wide])
        if only in document.LAPTOP:
            yield laptop.kill_at_moments(Lab(env, folder, 2, 2), seed)
