"""The optimizer and the learning rate schedule.

The learning rate is a function of the step alone, so snapshots need not hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from train.config import Config
from train.errors import UsageError


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names. Raises `UsageError` if --fused is given and it has no fused kernel."""
    lr, decay = config.scaled_lr, config.weight_decay
    if config.optimizer == "adadelta":
        if config.fused:
            raise UsageError(
                "--fused: PyTorch has no fused adadelta; use --optimizer sgd or adamw, or remove --fused"
            )
        return torch.optim.Adadelta(parameters, lr=lr, weight_decay=decay)
    fused = True if config.fused else None  # None: PyTorch chooses
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay, fused=fused)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def make_schedule(config: Config, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step (from 0): a linear warm-up, then the schedule's curve."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    total = max(1, config.epochs * steps_per_epoch - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.scheduler == "step":
            return float(0.1 ** (step // (steps_per_epoch * config.lr_epochs)))
        if config.scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / total)))
        return 1.0

    return lambda step: config.scaled_lr * factor(step)
