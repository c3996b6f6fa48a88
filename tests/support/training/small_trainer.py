"""A Trainer on a few random images, for check scripts and tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train import models
from train.components import assemble
from train.config import make
from train.data.datasets import Datasets, InMemoryDataset
from train.distributed.communicator import Communicator
from train.distributed.rank_info import RankInfo
from train.parallel import select
from train.record.output import RunOutput
from train.signals import StopRequest
from train.task import classification
from train.trainer import Trainer

SAMPLES, TEST_SAMPLES, BATCH = 22, 7, 5  # the last batch has 2 samples: with 3 ranks one of them is idle
CLASSES = 4


def single_process() -> Communicator:
    return Communicator(info=RankInfo(), device=torch.device("cpu"))


def images(
    samples: int, size: int, seed: int, dtype: torch.dtype = torch.float32, classes: int = CLASSES
) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, size, size, generator=generator, dtype=dtype)
    return InMemoryDataset(inputs, torch.randint(0, classes, (samples,), generator=generator))


def datasets(
    size: int, *, samples: int = SAMPLES, dtype: torch.dtype = torch.float32, test_seed: int = 2
) -> Datasets:
    return Datasets(
        train=images(samples, size, 1, dtype),
        test=images(TEST_SAMPLES, size, test_seed, dtype),
        task=classification(),
        shape=(1, size, size),
        classes=CLASSES,
    )


def small_trainer(
    comm: Communicator,
    out: Path,
    *,
    model: str = "small",
    data: Datasets | None = None,
    module: nn.Module | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    stop: StopRequest | None = None,
    metrics: RunOutput | None = None,
    **settings: Any,
) -> Trainer:
    """Return a Trainer on random images of 8x8, or 12x12 for the mnist model, whose output goes to `out`.

    `module` replaces the model that `model` names. `dropout` adds a layer that draws random numbers.
    """
    config = make(dataset="synthetic", model=model, out=str(out), **{"batch_size": BATCH, **settings})
    data = data or datasets(12 if model == "mnist" else 8, dtype=dtype)
    if smoothing := config.optimization.label_smoothing:
        data = dataclasses.replace(data, task=classification(smoothing=smoothing))
    if module is None:
        module = models.build(model, shape=data.shape, classes=data.classes, seed=config.optimization.seed)
    if dropout:
        module = nn.Sequential(module, nn.Dropout(dropout))
    out.mkdir(parents=True, exist_ok=True)
    strategy = select.build(config, comm, module.to(dtype), data.task, data.example)
    metrics = metrics or RunOutput(out, enabled=False)
    return assemble(config, comm, strategy, data, metrics, stop).trainer
