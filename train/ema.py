"""--ema: an exponential moving average of the weights, with which the model is evaluated, and which best.pt
holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.hooks import Hook, Run


class WeightAverage(Hook):
    """average = d * average + (1 - d) * weights, after each step n, where d is the smaller of the decay and
    (1 + n) / (10 + n): at first the average follows the weights, or it would consist of the initial ones for
    long. Buffers, such as BatchNorm's statistics, are those of the model. For sharded parameters each rank
    averages its parts."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = dict(module.named_parameters())
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._begun = False

    def begin_epoch(self, _run: Run) -> None:
        if not self._begun:  # start from the current weights, which may have been loaded after __init__
            self._begun = True
            for name, weight in self._weights.items():
                self._averages[name].copy_(weight.detach())

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        decay = min(self.decay, (1 + run.step) / (10 + run.step))
        torch._foreach_lerp_(list(self._averages.values()), list(self._weights.values()), 1 - decay)

    def evaluation(self, _run: Run) -> AbstractContextManager[object]:
        return self._in_place()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        if not self._begun:
            return
        for name, weight in self._weights.items():
            weights = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(weights)

    def state(self) -> dict[str, Any]:
        return {"decay": self.decay}

    def load(self, _state: dict[str, Any]) -> None:
        self._begun = True

    def tensors(self) -> dict[str, Tensor]:
        return {f"ema.{name}": value for name, value in self._averages.items()}
