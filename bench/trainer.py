"""The trainer's benchmarks, which are programs of their own (`bench/train/`)."""

from __future__ import annotations

import subprocess
import sys

from bench.harness import ROOT, Options


def bench_trainer(options: Options) -> None:
    """Training steps of `train/` (`python -m bench.train.bench`), compared with pytorch/examples."""
    print("trainer: samples per second, one process")
    given = ["--peers", str(options.examples.resolve())] if options.examples else []
    done = subprocess.run([sys.executable, "-m", "bench.train.bench", *given], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
