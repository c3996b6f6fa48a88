"""Measure the price of the process group: the small network alone, and under torchrun with one process, in
turns.

    python -m bench.train.process_group --json out.json

Every run is a process of its own, with random images that stay on the device and small batches, so that the
work per step that does not depend on the network shows: DDP's hooks and all-reduce, the collectives of our
own loop, the peer monitor. A run's figures are those of its metrics.jsonl, for the epochs after the first.
The flags are made here and not parsed, since parsing needs tyro, which a machine without network may lack.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train import signals
from train.config import make
from train.process_exit import exit_process

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"]
MODES: dict[str, list[str]] = {"alone": [], "torchrun": TORCHRUN}
FLAGS = {"dataset": "synthetic", "model": "small", "on_device": True, "tensorboard": False, "log_every": 0}
FULL = {"batch_size": 256, "synthetic_size": 65536, "epochs": 6}
SHORT = {"batch_size": 16, "synthetic_size": 64, "epochs": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line per mode and the ratio, and write them. Returns the exit code: 0, or 1 if a run
    failed."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="python -m bench.train.process_group",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=2, help="runs of each mode (default: 2)")
    parser.add_argument("--short", action="store_true", help="64 images and 2 epochs, to try it out")
    parser.add_argument("--json", help="file for the report")
    parser.add_argument("--flags", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.flags:
        from train.run import run_rank  # imports torch

        return run_rank(make(**json.loads(args.flags)), started)
    flags = {**FLAGS, **(SHORT if args.short else FULL), "device": args.device}
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(args.turns):
        for mode in MODES:
            found = run(mode, flags)
            if found is None:
                print(f"process_group: the run {mode} failed; its error is above", file=sys.stderr)
                return 1
            runs[mode].append(found)
    result = report(flags, runs)
    for mode, figures in result["modes"].items():
        print(
            f"small, {mode:<9} {figures['samples_per_second']:10.1f} samples/s, step "
            f"{figures['step_ms']:.3f} ms"
        )
    print(f"small, torchrun / alone: {result['ratio']:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def run(mode: str, flags: dict[str, Any]) -> dict[str, Any] | None:
    """Train in a process of its own. Returns its `seconds` from start to exit and its `epochs`; None if it
    failed."""
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps({**flags, "out": folder})
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, *MODES[mode], "-m", "bench.train.process_group", "--flags", given]
        started = time.perf_counter()
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, check=False
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            return None
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    epochs = [line for line in map(json.loads, lines) if line["kind"] == "epoch"]
    return {"seconds": seconds, "epochs": epochs}


def report(flags: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of each mode, the ratio (the median of those of the turns), and every run."""

    def median(one: dict[str, Any], name: str) -> float:
        return float(statistics.median(epoch[name] for epoch in one["epochs"][1:]))

    modes = {
        mode: {
            "samples_per_second": statistics.median(median(one, "samples_per_second") for one in found),
            "step_ms": 1e3 * statistics.median(median(one, "step_seconds") for one in found),
            "seconds": statistics.median(one["seconds"] for one in found),
        }
        for mode, found in runs.items()
    }
    ratios = [
        median(grouped, "samples_per_second") / median(alone, "samples_per_second")
        for alone, grouped in zip(runs["alone"], runs["torchrun"], strict=True)
    ]
    return {"flags": flags, "modes": modes, "ratio": statistics.median(ratios), "runs": runs}


if __name__ == "__main__":
    signals.exit_silently_on_sigint()
    exit_process(main())
