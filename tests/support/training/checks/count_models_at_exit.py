"""Runs train/main.py and prints at its end how many DistributedDataParallel modules still exist, the last
line in a handler of atexit.

`count_models_at_exit.py HOW FLAGS...`: with HOW = bug, training raises ZeroDivisionError.
"""

from __future__ import annotations

import atexit
import gc
import sys

from torch.nn.parallel import DistributedDataParallel

from train import main, process_exit, trainer

if sys.argv[1] == "bug":
    trainer.Trainer.fit = lambda _self: 1 / 0
code = main.main(sys.argv[2:])
gc.collect()
models = sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects())
atexit.register(print, "models", models)
process_exit.exit_process(code)
