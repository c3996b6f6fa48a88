"""--fail-rank: makes a rank exit like a crash, to test recovery."""

from __future__ import annotations

import os
import sys

from train.hooks import Hook, Run


class FaultInjection(Hook):
    """Ends this rank before a step, without clean-up, as --fail-rank says; not in a run that was resumed."""

    def before_step(self, run: Run) -> None:
        flags, rank = run.config.faults, run.comm.rank
        if run.resumed or rank != flags.fail_rank or run.step + 1 != flags.fail_step:
            return
        print(f"rank {rank} exits with code {flags.fail_code} (--fail-rank)", file=sys.stderr, flush=True)
        os._exit(flags.fail_code)
