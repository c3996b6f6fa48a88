"""One trainer on each rank, which may be told to stop in the middle of an epoch: what the proofs of resumption run.

`main` takes one JSON object, the fields of `Wish`. Each rank saves what it saw as REPORT.<rank>; the tests compare.
It must not know what is right: it only reports.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train import dist, models, parallel, preempt
from train.config import make
from train.data import Data, Tensors
from train.dist import Ranks
from train.errors import Preempted
from train.metrics import Metrics
from train.trainer import Trainer

SAMPLES, BATCH, EPOCHS = 22, 5, 3  # the last batch has 2 samples: with 3 ranks one of them is idle


@dataclass(frozen=True, kw_only=True)
class Wish:
    """`stop`: in this step (from 0) the last rank is told to stop. `shift`: which of `disks` disks is rank 0's; with
    no disks all ranks share one. The other fields are as in Config."""

    out: str
    report: str
    runs: dict[str, dict[str, Any]]
    stop: int = -1
    disks: int = 0
    shift: int = 0
    dropout: float = 0.3


def main(argv: list[str]) -> int:
    wish = Wish(**json.loads(argv[0]))
    config = make(dataset="synthetic", timeout=60.0)
    with dist.join(config, dist.find_place(config, os.environ)) as ranks:
        seen = {name: one(wish, name, ranks) for name in wish.runs}
        torch.save(seen, f"{wish.report}.{ranks.rank}")
    return 0


def one(wish: Wish, name: str, ranks: Ranks) -> dict[str, Any]:
    """What the run `name` came to on this rank."""
    disk = f"disk{(ranks.rank + wish.shift) % wish.disks}" if wish.disks else "shared"
    out = Path(wish.out, name, disk)
    out.mkdir(parents=True, exist_ok=True)
    with preempt.listen() as stop:
        subject = trainer(wish, name, ranks, out, stop)
        used = record(subject)
        subject.resume()
        resumed_at = subject.step
        subject.metrics.open(subject.step, epochs=subject.validated)
        try:
            subject.fit()
        except Preempted:
            pass
        subject.metrics.close()
    return {"resumed_at": resumed_at, "step": subject.step, "used": used, "test_loss": subject.test_loss}


def trainer(wish: Wish, name: str, ranks: Ranks, out: Path, stop: preempt.StopSignal) -> Trainer:
    settings = {"model": "mnist", "batch_size": BATCH, "epochs": EPOCHS, "log_every": 2, **wish.runs[name]}
    config = make(dataset="synthetic", out=str(out), **settings)
    size = 12

    def prepare(inputs: Tensor) -> Tensor:
        if subject.step == wish.stop and ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return inputs

    data = Data(
        train=images(SAMPLES, size),
        test=images(7, size),
        shape=(1, size, size),
        classes=SAMPLES,
        prepare=prepare,
    )
    module = models.build(config.model, shape=data.shape, classes=data.classes, seed=config.seed)
    if wish.dropout:
        module = torch.nn.Sequential(module, torch.nn.Dropout(wish.dropout))
    spread = parallel.build(config, ranks, module, shape=data.shape)
    metrics = Metrics(out, enabled=ranks.is_main, tensorboard=False)
    subject = Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics, stop=stop)
    return subject


def images(samples: int, size: int) -> Tensors:
    """Each sample is a class of its own, so that labels say which samples were used."""
    generator = torch.Generator().manual_seed(samples)
    return Tensors(torch.randn(samples, 1, size, size, generator=generator), torch.arange(samples))


def record(subject: Trainer) -> dict[int, list[int]]:
    """Step -> the samples that this rank trained on in it, filled in as the run goes on."""
    used: dict[int, list[int]] = {}
    score = subject.score

    def noted(scores: Tensor, labels: Tensor) -> Tensor:
        if subject.parallel.module.training:
            used.setdefault(subject.step, []).extend(labels.tolist())
        return score(scores, labels)

    subject.score = noted
    return used
