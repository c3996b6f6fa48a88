"""Faults of a job in the lab: what the commands say, how long the last rank lives, the exit code, and what is left.

`python -m bench faults` runs a job of gloo into each fault, on clusters of 2 nodes x 2 ranks and 4 x 1 in the simulator, in
the foreground and detached with nobody connected. A second client, with a copy of the keys in another folder, has to say
the same as the first. With --write it puts its table into docs/faults.md.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.common import script, simulator
from bench.faults import document, laptop, measure
from bench.faults.cases import FAULTS
from bench.faults.lab import Lab
from bench.faults.measure import Row


def bench(only: str, *, write: bool, seed: int) -> None:
    """Run the faults whose name contains `only`; exit with 1 if one is not as expected."""
    print("faults: gloo on namespace nodes; seconds from the fault to the last rank gone, and the exit code")
    load = os.getloadavg()[0]
    done: list[Row] = []
    with simulator("namespace") as (found, env), tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(__file__).with_name("script.py"), folder)
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}

        def lab(nodes: int, ranks: int) -> Lab:
            return Lab(script("cloudddp"), inside, Path(folder), nodes, ranks)

        chosen = [one for one in FAULTS if only in one.name]
        for one in measure.rows(lab(2, 2), chosen):
            _show(one, done)
        for one in measure.rows(lab(4, 1), [fault for fault in chosen if fault.wide]):
            _show(one, done)
        if only in document.LAPTOP:
            _show(laptop.kill_at_moments(lab(2, 2), seed), done)
    print("\n".join([*document.HEAD, *document.table(done)]))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if write:
        document.write(done, load)
    wrong = [one for one in done if one.problems]
    for one in wrong:
        how = "connected" if one.attached else "detached"
        print(f"NOT AS EXPECTED: {one.fault}, {one.shape}, {how}: {'; '.join(one.problems)}")
    if wrong:
        raise SystemExit(1)


def _show(row: Row, done: list[Row]) -> None:
    done.append(row)
    print(f"  {asdict(row)}", flush=True)
