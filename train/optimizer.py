"""The optimizer and its groups of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from train.config import Config
from train.errors import UsageError


def make_optimizer(config: Config, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names for the parameters that are trained. Raises `UsageError` if --fused is
    given and it has no fused kernel, or --freeze has left nothing to train."""
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
    """Return the parameters that are trained as one group; without `decay_all` as two, where the second, with biases and
    the weights of normalization layers, has no weight decay."""
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
