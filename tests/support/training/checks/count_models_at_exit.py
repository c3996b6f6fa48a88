"""Runs train/main.py and prints at its end how many DistributedDataParallel modules still exist.

`count_models_at_exit.py HOW FLAGS...`: with HOW = bug, training raises ZeroDivisionError.
"""

from __future__ import annotations

import gc
import sys

from torch.nn.parallel import DistributedDataParallel

from train import main, process_exit, trainer

if sys.argv[1] == "bug":
    trainer.Trainer.fit = lambda _self: 1 / 0
code = main.main(sys.argv[2:])
gc.collect()
print("models", sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects()))
process_exit.exit_process(code)
