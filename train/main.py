"""Train a model. Start reading here.

Started by torchrun, by hand on each node, or as a single process; see docs/training.md or --help. torch is
imported only after the flags have been checked, so that a wrong flag is reported at once.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a file: make `train` importable, and hide this folder's modules as top-level names.
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]

from train import signals
from train.cli import parse
from train.errors import TrainError, UsageError
from train.process_exit import exit_process

if TYPE_CHECKING:
    from train.run import Builders


def main(argv: list[str] | None = None) -> int:
    """Run the training that the command line describes.

    Returns the exit code: 0 success; 1 failure; 2 bad usage or data; 130 interrupted; 143 stopped by SIGTERM.
    """
    return run(sys.argv[1:] if argv is None else argv, time.perf_counter())


def run(
    argv: list[str],
    started: float,
    builders: Builders | None = None,
    *,
    prog: str = "train/main.py",
    defaults: dict[str, Any] | None = None,
) -> int:
    """The same for data and a model of your own; see script.py."""
    try:
        config = parse(argv, prog=prog, defaults=defaults)
        if builders is not None:
            builders.check()
        if config.rendezvous.spawn and "TORCHELASTIC_RUN_ID" in os.environ:
            # Each rank of torchrun would start a job of its own, all in the same folder.
            raise UsageError("--spawn starts the ranks without torchrun: use one of the two")
    except TrainError as error:
        # All ranks get the same flags: one per node reports the error.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train: {error}\n", end="", file=sys.stderr)
        return error.exit_code

    # These import torch.
    if config.rendezvous.spawn:
        from train.distributed.spawn import spawn
        from train.run import run_rank

        return spawn(config, partial(run_rank, started=started, builders=builders))
    from train.run import run_rank

    return run_rank(config, started, builders)


if __name__ == "__main__":
    signals.exit_silently_on_sigint()
    exit_process(main())
