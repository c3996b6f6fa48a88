"""For a script with data and a model of your own: the trainer's flags, its loop, and its snapshots. See
docs/training.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from train import signals
from train.config import Config
from train.data.datasets import Datasets
from train.main import run
from train.process_exit import exit_process
from train.run import Builders


def start(
    load: Callable[..., Datasets], build: Callable[[Config, Datasets], nn.Module], **defaults: Any
) -> NoReturn:
    """Train, and end the process with the exit code of `train/main.py`.

    `load(config, download=...)` returns the datasets with their task, and `build(config, datasets)` the
    model; both are functions at the top of the script, which calls this below `if __name__ == "__main__":`.
    `defaults` are flags by name, where the command line does not give them; --out is runs/ and the name of
    the script.
    """
    signals.exit_silently_on_sigint()
    defaults = {"dataset": "own", "model": "own", "out": f"runs/{Path(sys.argv[0]).stem}", **defaults}
    exit_process(
        run(sys.argv[1:], time.perf_counter(), Builders(load, build), prog=sys.argv[0], defaults=defaults)
    )
