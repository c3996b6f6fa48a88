"""The learning rate schedule: a function of the step alone, so that snapshots need not hold it."""

from __future__ import annotations

import math
from collections.abc import Callable

from train.config import Config


def make_schedule(config: Config, steps_per_epoch: int, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step (from 0): a linear warm-up, then the schedule's curve."""
    flags = config.optimization
    warmup = round(flags.warmup_epochs * steps_per_epoch)
    decay = max(1, total_steps - warmup)
    smallest = flags.min_lr / config.scaled_lr

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if flags.scheduler == "step":
            return float(0.1 ** (step // (steps_per_epoch * flags.lr_epochs)))
        if flags.scheduler == "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / decay)))
            return smallest + (1 - smallest) * cosine
        return 1.0

    return lambda step: config.scaled_lr * factor(step)
