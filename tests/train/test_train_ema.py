"""--ema: what the average of the weights is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training.output import max_difference
from support.training.small_trainer import single_process, small_trainer
from torch import Tensor

from train.hooks import Hook, Run

pytestmark = pytest.mark.torch


class Weights(Hook):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def after_step(self, run: Run) -> None:
        parameters = run.strategy.module.named_parameters()
        self.kept.append({name: value.detach().clone() for name, value in parameters})


def test_average_of_weights_follows_them_at_first(tmp_path: Path) -> None:
    trainer = small_trainer(single_process(), tmp_path, ema=0.5, epochs=4, dtype=torch.float64)
    expected = {name: value.detach().clone() for name, value in trainer.strategy.module.named_parameters()}
    weights = Weights()
    trainer.hooks.append(weights)
    trainer.fit()
    assert len(weights.kept) == 20
    for step, kept in enumerate(weights.kept, start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * value + (1 - decay) * kept[name] for name, value in expected.items()}
    averages = {name.removeprefix("ema."): value for name, value in trainer._tensors().items()}
    assert max_difference(averages, expected) < 1e-12
