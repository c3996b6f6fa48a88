"""Runs train/main.py with one rank that is slow in every step.

`slow_rank.py RANK WHERE SECONDS FLAGS...`: WHERE is `before` the forward pass, as slow data would be, or
`inside` it. With STEP_FOLDER in the environment, each rank reports its steps to RANK.json there.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.main import main
from train.process_exit import exit_process

slow, where, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
rank = int(os.environ["RANK"])
if folder := os.environ.get("STEP_FOLDER"):
    os.environ["CLOUDDDP_STEP_FILE"] = f"{folder}/{rank}.json"


def before_forward(module: nn.Module, _inputs: object) -> None:
    kind = DistributedDataParallel if where == "before" else nn.Linear
    if isinstance(module, kind) and module.training and rank == slow:
        time.sleep(seconds)


torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
exit_process(main(sys.argv[4:]))
