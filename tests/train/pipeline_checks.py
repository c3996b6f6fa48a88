"""Runs on the ranks: pipelines beside plain training, many checks in one job.

`pipeline_checks.py FOLDER` saves what this rank saw as FOLDER/rank<r>.pt. The plain runs that the others are compared
with happen in the same processes, each rank for itself. It must not know what is right: it only reports.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train_checks import images

from train import dist, models, parallel, scores
from train.config import make
from train.data import Data
from train.dist import Place, Ranks
from train.errors import TrainError
from train.main import leave
from train.metrics import Metrics
from train.parallel import Replicas
from train.trainer import Trainer

BATCH, TESTS = 12, 7
ALONE = Ranks(place=Place(), device=torch.device("cpu"))
PLAIN = {"optimizer": "sgd", "lr": 0.05, "scheduler": "cosine"}
MORE = {"optimizer": "sgd", "lr": 0.1, "label_smoothing": 0.1, "clip": 0.5, "weight_decay": 0.1}


def trainer(
    ranks: Ranks, folder: Path, *, samples: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> Trainer:
    config = make(dataset="synthetic", batch_size=BATCH, out=str(folder / f"of{ranks.world}"), **settings)
    data = Data(
        train=images(samples, 8, 1, dtype),
        test=images(TESTS, 8, 2, dtype),
        shape=(1, 8, 8),
        classes=4,
        prepare=lambda inputs: inputs,
    )
    config.folder.mkdir(parents=True, exist_ok=True)
    module = models.build("small", shape=data.shape, classes=4, seed=config.seed).to(dtype)
    spread = parallel.build(config, ranks, module, shape=data.shape)
    metrics = Metrics(config.folder, enabled=False, tensorboard=False)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def weights(subject: Trainer) -> dict[str, Tensor]:
    return subject.parallel.state(subject.optimizer)[0]


def train(ranks: Ranks, folder: Path, **settings: Any) -> dict[str, Any]:
    """Two epochs: the weights at the end, and the figures of the last one in training and validation."""
    subject = trainer(ranks, folder / f"rank{ranks.rank}", epochs=2, **settings)
    subject.resume()  # there is nothing to resume from, but buckets to warm
    subject.train_epoch()
    figures = subject.train_epoch()
    return {"weights": weights(subject), "train": figures, "test": subject.validate()}


def train_in_two_processes(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """By "plain": batches of 12, 12 and 10; by "more": three of 12 and one of a single sample."""
    plain = {"samples": 34, **PLAIN}
    more = {"samples": 37, **MORE}
    own = folder / f"alone{ranks.rank}"  # alone, every rank is the one that writes
    return {
        "plain": {
            "sequential": train(ALONE, own, **plain),
            "naive": train(ALONE, own, parallel="pipeline", **plain),
            "split 5": train(ALONE, own, parallel="pipeline", split_size=5, cuts="conv2", **plain),
            "hybrid": train(ranks, folder, parallel="pipeline", split_size=2, **plain),
            "gpipe": train(ranks, folder, parallel="gpipe", **plain),
            "1f1b": train(ranks, folder, parallel="1f1b", microbatches=6, **plain),
        },
        "more": {
            "sequential": train(ALONE, own, **more),
            "split 1": train(ALONE, own, parallel="pipeline", split_size=1, accumulate=3, **more),
            "hybrid": train(ranks, folder, parallel="pipeline", split_size=4, accumulate=2, **more),
            "gpipe": train(
                ranks, folder, parallel="gpipe", cuts="conv2", channels_last=True, accumulate=3, **more
            ),
            "1f1b": train(ranks, folder, parallel="1f1b", accumulate=2, microbatches=2, **more),
        },
    }


def train_in_three_stages(ranks: Ranks, folder: Path) -> dict[str, Any]:
    plain = {"samples": 34, **PLAIN}
    return {
        "plain": {
            "sequential": train(ALONE, folder / f"alone{ranks.rank}", **plain),
            "gpipe": train(ranks, folder, parallel="gpipe", **plain),
            "1f1b": train(ranks, folder, parallel="1f1b", cuts="conv2,fc2", **plain),
        }
    }


def train_in_half_precision(ranks: Ranks, folder: Path) -> dict[str, float]:
    common = {"samples": 34, "amp": "bf16", "dtype": torch.float32, **PLAIN}
    runs = {
        "sequential": train(ALONE, folder / f"alone{ranks.rank}", **common),
        "pipeline": train(ranks, folder, parallel="pipeline", split_size=3, **common),
        "gpipe": train(ranks, folder, parallel="gpipe", **common),
    }
    return {name: run["train"]["loss"] for name, run in runs.items()}


def take_one_batch(ranks: Ranks, _folder: Path) -> dict[str, Any]:
    """A network with BatchNorm on 10 samples in pieces of 3, 3, 2 and 2: gradients and buffers of each mode."""
    inputs, labels = images(10, 12, 3, torch.float64)[:]
    score = partial(scores.classify, smoothing=0.0)

    def built() -> torch.nn.Module:
        return models.build("mnist", shape=(1, 12, 12), classes=4, seed=5).double()

    def seen(module: torch.nn.Module) -> dict[str, Tensor]:
        gradients = {f"grad of {name}": weight.grad for name, weight in module.named_parameters()}
        return {**gradients, **dict(module.named_buffers())}

    def by_hand(sizes: list[int], *, training: bool) -> dict[str, Tensor]:
        module = built().train(training)
        for piece, answers in zip(inputs.split(sizes), labels.split(sizes), strict=True):
            (score(module(piece), answers)[0] / 10).backward()
        return seen(module)

    def spread(ranks: Ranks, mode: str, *, training: bool) -> dict[str, Tensor]:
        pieces = {"split_size": 3} if mode == "pipeline" else {}
        config = make(dataset="synthetic", batch_size=12, parallel=mode, cuts="norm2", **pieces)
        subject: Replicas = parallel.build(config, ranks, built(), shape=(1, 12, 12))
        subject.module.train(training)
        subject.train_batch([(inputs, labels, 10)], score, global_count=10)
        return seen(subject.module)

    return {
        kind: {
            "by hand": by_hand([3, 3, 2, 2] if training else [10], training=training),
            "pipeline": spread(ALONE, "pipeline", training=training),
            "gpipe": spread(ranks, "gpipe", training=training),
            "1f1b": spread(ranks, "1f1b", training=training),
        }
        for kind, training in (("training", True), ("eval", False))
    }


def change_modes(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Five epochs, each by another mode that resumes from the snapshot of the one before; and five by one process."""
    settings = {"samples": 34, "epochs": 5, "optimizer": "adamw", "lr": 0.01, "scheduler": "cosine"}
    whole = trainer(ALONE, folder / f"alone{ranks.rank}", **settings)
    for _ in range(5):
        whole.train_epoch()
    resumed_at = []
    for mode in ("pipeline", "gpipe", "ddp", "1f1b", "pipeline"):
        pieces = {"split_size": 5} if mode == "pipeline" else {}
        part = trainer(ranks, folder / "modes", parallel=mode, **pieces, **settings)
        part.resume()
        resumed_at.append(part.step)
        part.train_epoch()
        part.save()
    return {"whole": weights(whole), "parts": weights(part), "resumed_at": resumed_at}


def refuse(ranks: Ranks, folder: Path) -> dict[str, str]:
    attempts: dict[str, dict[str, Any]] = {
        "few microbatches": {"parallel": "1f1b", "microbatches": ranks.world - 1},
        "many cuts": {"parallel": "gpipe", "cuts": "conv2,pool,fc1,fc2"},
        "sync_bn": {"parallel": "pipeline", "sync_bn": True},
    }
    told = {}
    for name, settings in attempts.items():
        try:
            trainer(ranks, folder, samples=34, **settings)
        except TrainError as error:
            told[name] = str(error)
    return told


def load_another_model(ranks: Ranks, folder: Path) -> str:
    """The last stage alone differs; every rank is to refuse."""
    subject = trainer(ranks, folder, samples=34, parallel="gpipe")
    model, optimizer = subject.parallel.state(subject.optimizer)
    try:
        subject.parallel.load(subject.optimizer, ({**model, "fc2.bias": torch.zeros(9)}, optimizer))
    except KeyError as error:
        return str(error)
    return "loaded"


def main(folder: Path) -> None:
    with dist.join(make(dataset="synthetic", timeout=60.0), dist.find_place(make(), os.environ)) as ranks:
        checks = [train_in_three_stages]
        if ranks.world == 2:
            checks = [train_in_two_processes, train_in_half_precision, take_one_batch, change_modes]
            checks += [refuse, load_another_model]
        seen = {check.__name__: check(ranks, folder) for check in checks}
        torch.save(seen, folder / f"rank{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
