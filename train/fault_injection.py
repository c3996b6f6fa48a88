"""--fail-rank: makes a rank exit like a crash, to test recovery."""

from __future__ import annotations

import os
import sys

from train.config import Config


def exit_if_requested(config: Config, *, rank: int, step: int) -> None:
    """End the process without clean-up if `config` asks this rank to exit before this step (from 1)."""
    if rank != config.fail_rank or step != config.fail_step:
        return
    message = f"rank {rank} exits with code {config.fail_code} (--fail-rank)"
    print(message, file=sys.stderr, flush=True)
    os._exit(config.fail_code)
