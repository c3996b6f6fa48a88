"""Runs on the ranks: trains in float64 in several ways that must come to the same weights.

`equality_checks.py FOLDER` saves what this rank saw as FOLDER/rank<r>.pt; the tests compare. It must not know what is
right, except for the reference that each network is trained by here, in plain PyTorch without the Trainer.
"""

from __future__ import annotations

import copy
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train import dist, models, parallel
from train.config import make
from train.data import Data, Tensors
from train.dist import Ranks
from train.main import leave
from train.metrics import Metrics
from train.trainer import Trainer

SAMPLES, BATCH, EPOCHS = 22, 5, 2  # the last batch has 2 samples: with 3 ranks one of them is idle
PARTS = (1, 4)
SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def images(size: int) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 1, size, size, generator=generator, dtype=torch.float64)
    return Tensors(inputs, torch.randint(0, 4, (SAMPLES,), generator=generator))


def trainer(ranks: Ranks, model: str, size: int, folder: Path, **flags: Any) -> Trainer:
    settings = {"scheduler": "none", **SGD, **flags}
    config = make(
        dataset="synthetic", model=model, batch_size=BATCH, epochs=EPOCHS, out=str(folder), **settings
    )
    shape = (1, size, size)
    data = Data(train=images(size), test=images(size), shape=shape, classes=4, prepare=lambda inputs: inputs)
    module = models.build(model, shape=shape, classes=4, seed=0).double()
    spread = parallel.build(config, ranks, module, shape=shape)
    metrics = Metrics(folder, enabled=False, tensorboard=False)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def trained(subject: Trainer) -> dict[str, Tensor]:
    while subject.step < subject.total_steps:
        subject.train_epoch()
    subject.parallel.align_buffers()
    return {name: value.clone() for name, value in subject.parallel.module.state_dict().items()}


def in_parts(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One, two and four parts per share: with four, some have no sample."""
    return {parts: trained(trainer(ranks, "small", 8, folder, accumulate=parts)) for parts in (1, 2, 4)}


def clipped(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    flags = {
        "clip": 0.1,
        "label_smoothing": 0.1,
        "warmup_epochs": 0.5,
        "scheduler": "cosine",
        "accumulate": 2,
    }
    return trained(trainer(ranks, "small", 8, folder, **flags))


def plainly(_ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """The same as `clipped`, in a loop that knows nothing of ranks, parts or shares."""
    subject = trainer(Ranks(place=dist.Place(), device=torch.device("cpu")), "small", 8, folder)
    module = models.build("small", shape=(1, 8, 8), classes=4, seed=0).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    data = images(8)
    warmup, total = 2, 10  # half of 5 steps, rounded to even; two epochs of 5
    curve = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warmup)
    step = 0
    for epoch in range(EPOCHS):
        for shard in subject.batches.epoch(epoch):
            if step < warmup:
                optimizer.param_groups[0]["lr"] = 0.05 * (step + 1) / warmup
            optimizer.zero_grad()
            loss = F.cross_entropy(
                module(data.inputs[shard.indices]), data.labels[shard.indices], label_smoothing=0.1
            )
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            step += 1
            if step > warmup:
                curve.step()
    return module.state_dict()


def with_batchnorm(ranks: Ranks, folder: Path) -> dict[int, dict[str, Tensor]]:
    """In one part per share, and in four, of which some have no sample, also on rank 0."""
    return {parts: trained(trainer(ranks, "mnist", 12, folder, accumulate=parts)) for parts in PARTS}


def validated(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A network with BatchNorm, trained for an epoch, then validated twice."""
    subject = trainer(ranks, "mnist", 12, folder)
    subject.train_epoch()
    figures = [subject.validate()]
    subject.parallel.align_buffers()
    before = {name: value.clone() for name, value in subject.parallel.module.state_dict().items()}
    figures.append(subject.validate())
    return {"figures": figures, "before": before, "after": subject.parallel.module.state_dict()}


def reductions(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What DDP was told, and in which parts of each batch it was to reduce the gradients."""
    subject = trainer(ranks, "small", 8, folder, accumulate=3, bucket_mb=2)
    promised = trainer(ranks, "small", 8, folder, static_graph=True).parallel.model
    model, reduced = subject.parallel.model, []
    if ranks.place.grouped:
        subject.parallel.module.register_forward_pre_hook(
            lambda *_: reduced.append(model.require_backward_grad_sync)
        )
        subject.train_epoch()
    names = ("bucket_bytes_cap", "gradient_as_bucket_view", "static_graph")
    told = {name: (getattr(model, name, None), getattr(promised, name, None)) for name in names}
    return {"told": told, "reduced": reduced}


def ghosts(ranks: Ranks, folder: Path) -> dict[int, dict[str, Tensor]]:
    """What BatchNorm in ranks amounts to: each part of each share normalised by itself, the gradients added up, and
    the running statistics of the first share."""
    return {parts: ghost(ranks, folder, parts) for parts in PARTS}


def ghost(ranks: Ranks, folder: Path, parts: int) -> dict[str, Tensor]:
    subject = trainer(Ranks(place=dist.Place(), device=torch.device("cpu")), "mnist", 12, folder)
    module = models.build("mnist", shape=(1, 12, 12), classes=4, seed=0).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    data = images(12)
    for epoch in range(EPOCHS):
        for shard in subject.batches.epoch(epoch):
            optimizer.zero_grad()
            statistics = None
            before = copy.deepcopy(dict(module.named_buffers()))
            for rank in range(ranks.world):
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])
                mine = shard.indices[rank :: ranks.world]
                cuts = [len(mine) * part // parts for part in range(parts + 1)]
                for part in filter(None, (mine[a:b] for a, b in pairwise(cuts))):
                    scores = module(data.inputs[part])
                    loss = F.cross_entropy(scores, data.labels[part], reduction="sum") / shard.global_count
                    loss.backward()
                statistics = statistics or copy.deepcopy(dict(module.named_buffers()))
            for name, buffer in module.named_buffers():
                buffer.copy_(statistics[name])
            optimizer.step()
    return module.state_dict()


CHECKS = (in_parts, clipped, plainly, with_batchnorm, validated, reductions, ghosts)


def main(folder: Path) -> None:
    config = make(dataset="synthetic", timeout=60.0)
    with dist.join(config, dist.find_place(config, os.environ)) as ranks:
        seen = {check.__name__: check(ranks, folder) for check in CHECKS}
        torch.save(seen, folder / f"rank{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
