"""Checks for test_train_equality.py: training in float64 in several ways that must give the same weights.

`equality_checks.py FOLDER` runs on each rank. The references are computed here, in plain PyTorch without the
Trainer.
"""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from support.training.check_job import run_checks
from support.training.small_trainer import BATCH, CLASSES, SAMPLES, images, single_process, small_trainer
from torch import Tensor, nn

from train import models
from train.data.datasets import Datasets
from train.data.sampler import GlobalBatchSampler
from train.distributed.communicator import Communicator
from train.task import classification
from train.trainer import Trainer

EPOCHS = 2
PARTS = (1, 4)
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def data(size: int) -> Datasets:
    both = images(SAMPLES, size, 1, torch.float64)
    return Datasets(train=both, test=both, task=classification(), shape=(1, size, size), classes=CLASSES)


def trainer(comm: Communicator, model: str, folder: Path, **flags: Any) -> Trainer:
    settings = {"optimizer": "sgd", "scheduler": "none", "epochs": EPOCHS, **SGD, **flags}
    size = 12 if model == "mnist" else 8
    return small_trainer(comm, folder, model=model, data=data(size), dtype=torch.float64, **settings)


def trained(trainer: Trainer) -> dict[str, Tensor]:
    while trainer.step < trainer.total_steps:
        trainer.train_epoch()
    trainer.strategy.sync_buffers()
    return {name: value.clone() for name, value in trainer.strategy.module.state_dict().items()}


def reference_model(name: str, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name, shape=(1, size, size), classes=CLASSES, seed=0).double()
    return module, torch.optim.SGD(module.parameters(), **SGD)


SAMPLER = GlobalBatchSampler(samples=SAMPLES, batch_size=BATCH, seed=0)


def single(comm: Communicator, folder: Path) -> dict[str, Tensor]:
    """Trained by each rank alone."""
    return trained(trainer(single_process(), "small", folder / f"single{comm.rank}"))


def accumulated(comm: Communicator, folder: Path) -> dict[int, dict[str, Tensor]]:
    """One, two and four parts per share: with four, some have no sample."""
    return {parts: trained(trainer(comm, "small", folder, accumulate=parts)) for parts in (1, 2, 4)}


def clipped(comm: Communicator, folder: Path) -> dict[str, Tensor]:
    flags = {
        "clip": 0.1,
        "label_smoothing": 0.1,
        "warmup_epochs": 0.5,
        "scheduler": "cosine",
        "accumulate": 2,
    }
    return trained(trainer(comm, "small", folder, **flags))


def clipped_reference(_comm: Communicator, _folder: Path) -> dict[str, Tensor]:
    """The same as `clipped`, in a plain loop without ranks, parts or shares."""
    module, optimizer = reference_model("small", 8)
    train = data(8).train
    warmup, total = 2, 10  # half of 5 steps, rounded to even; two epochs of 5
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warmup)
    step = 0
    for epoch in range(EPOCHS):
        for batch in SAMPLER.batches(epoch):
            if step < warmup:
                optimizer.param_groups[0]["lr"] = 0.05 * (step + 1) / warmup
            optimizer.zero_grad()
            scores = module(train.inputs[batch.indices])
            F.cross_entropy(scores, train.labels[batch.indices], label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            step += 1
            if step > warmup:
                cosine.step()
    return module.state_dict()


def with_batchnorm(comm: Communicator, folder: Path) -> dict[int, dict[str, Tensor]]:
    """One part per share, and four, some of which have no sample, also on rank 0."""
    return {parts: trained(trainer(comm, "mnist", folder, accumulate=parts)) for parts in PARTS}


def batchnorm_reference(comm: Communicator, _folder: Path) -> dict[object, dict[str, Tensor]]:
    """Each part of each share normalized by itself, the gradients added up, and the running statistics of
    rank 0; and the same of whole batches."""
    shares = {parts: train_with_ghost_batchnorm(comm.world_size, parts) for parts in PARTS}
    return {**shares, "whole batch": train_with_ghost_batchnorm(1, 1)}


def train_with_ghost_batchnorm(world_size: int, parts: int) -> dict[str, Tensor]:
    module, optimizer = reference_model("mnist", 12)
    train = data(12).train
    for epoch in range(EPOCHS):
        for batch in SAMPLER.batches(epoch):
            optimizer.zero_grad()
            statistics = None
            before = copy.deepcopy(dict(module.named_buffers()))
            for rank in range(world_size):
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])
                own = batch.indices[rank::world_size]
                bounds = [len(own) * part // parts for part in range(parts + 1)]
                for part in filter(None, (own[a:b] for a, b in pairwise(bounds))):
                    loss = F.cross_entropy(module(train.inputs[part]), train.labels[part], reduction="sum")
                    (loss / batch.global_count).backward()
                statistics = statistics or copy.deepcopy(dict(module.named_buffers()))
            for name, buffer in module.named_buffers():
                buffer.copy_(statistics[name])
            optimizer.step()
    return module.state_dict()


def validated(comm: Communicator, folder: Path) -> dict[str, Any]:
    """A model with BatchNorm, trained for an epoch and validated twice."""
    subject = trainer(comm, "mnist", folder)
    subject.train_epoch()
    figures = [subject.evaluate()]
    subject.strategy.sync_buffers()
    before = {name: value.clone() for name, value in subject.strategy.module.state_dict().items()}
    figures.append(subject.evaluate())
    return {"figures": figures, "before": before, "after": subject.strategy.module.state_dict()}


def reductions(comm: Communicator, folder: Path) -> dict[str, Any]:
    """The options of DDP, and for which parts of each batch it reduces the gradients."""
    subject = trainer(comm, "small", folder, accumulate=3, bucket_mb=2)
    static = trainer(comm, "small", folder, static_graph=True).strategy.model
    model, reduced = subject.strategy.model, []
    subject.strategy.module.register_forward_pre_hook(
        lambda *_: reduced.append(model.require_backward_grad_sync)
    )
    subject.train_epoch()
    names = ("bucket_bytes_cap", "gradient_as_bucket_view", "static_graph")
    options = {name: (getattr(model, name), getattr(static, name)) for name in names}
    return {"options": options, "reduced": reduced}


CHECKS = (single, accumulated, clipped, clipped_reference, with_batchnorm, batchnorm_reference)
CHECKS += (validated, reductions)


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), CHECKS)
