"""The optimizer, its groups of parameters, and the learning rate: a function of the step alone, so that
snapshots need not hold it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train.config import Config
from train.errors import UsageError


def make_optimizer(config: Config, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names for the parameters that are trained. Raises `UsageError` if
    --fused is given and it has no fused kernel, or --freeze has left nothing to train."""
    flags, lr = config.optimization, config.scaled_lr
    groups = parameter_groups(module, flags.weight_decay, decay_all=flags.decay_all)
    if flags.optimizer == "adadelta":
        if config.precision.fused:
            raise UsageError(
                "--fused: PyTorch has no fused adadelta; use --optimizer sgd or adamw, or remove --fused"
            )
        return torch.optim.Adadelta(groups, lr=lr)
    fused = True if config.precision.fused else None  # None: PyTorch chooses
    if flags.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=flags.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=lr, betas=flags.betas, eps=flags.eps, fused=fused)


def parameter_groups(module: nn.Module, decay: float, *, decay_all: bool) -> list[dict[str, Any]]:
    """Return the parameters that are trained as one group; without `decay_all` as two, where the second, with
    biases and the weights of normalization layers, has no weight decay."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if decay_all:
        return [{"params": trained, "weight_decay": decay}]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def make_schedule(config: Config, steps_per_epoch: int, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step (from 0): a linear warm-up, then the curve of the
    schedule."""
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
