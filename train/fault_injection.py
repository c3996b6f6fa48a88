"""--fail-rank: makes a rank exit like a crash, to test recovery."""

from __future__ import annotations

import os
import sys

from train.flags import FaultFlags


def exit_if_requested(flags: FaultFlags, *, rank: int, step: int) -> None:
    """End the process without clean-up if `flags` ask this rank to exit before this step (from 1)."""
    if rank != flags.fail_rank or step != flags.fail_step:
        return
    message = f"rank {rank} exits with code {flags.fail_code} (--fail-rank)"
    print(message, file=sys.stderr, flush=True)
    os._exit(flags.fail_code)
