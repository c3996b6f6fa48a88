"""Runs train/main.py, but waits in the first validation until the test lets it continue.

`wait_in_validation.py SIGNALS FLAGS...`: creates SIGNALS/validating and waits for SIGNALS/continue.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from train.main import main
from train.process_exit import exit_process

signals = Path(sys.argv[1])


def before_forward(module: torch.nn.Module, _inputs: object) -> None:
    validating = signals / "validating"
    if not module.training and not validating.exists():
        validating.touch()
        while not (signals / "continue").exists():
            time.sleep(0.01)


torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
exit_process(main(sys.argv[2:]))
