"""Checks for test_train_pipeline.py: pipelines beside plain training. `pipeline_checks.py FOLDER` runs on
each rank.

The plain runs that the others are compared with happen in the same processes, each rank for itself.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.training.check_job import run_checks
from support.training.small_trainer import datasets, images, single_process, small_trainer
from torch import Tensor

from train import models
from train.config import make
from train.distributed.communicator import Communicator
from train.errors import TrainError
from train.parallel import select
from train.task import classification
from train.trainer import Trainer

BATCH = 12
SINGLE = single_process()
PLAIN = {"samples": 34, "optimizer": "sgd", "lr": 0.05, "scheduler": "cosine"}
MORE = {
    "samples": 37,
    "optimizer": "sgd",
    "lr": 0.1,
    "label_smoothing": 0.1,
    "clip": 0.5,
    "weight_decay": 0.1,
}


def trainer(
    comm: Communicator, folder: Path, *, samples: int, dtype: torch.dtype = torch.float64, **settings: Any
) -> Trainer:
    data = datasets(8, samples=samples, dtype=dtype)
    out = folder / f"world{comm.world_size}"
    return small_trainer(comm, out, data=data, dtype=dtype, batch_size=BATCH, **settings)


def weights(subject: Trainer) -> dict[str, Tensor]:
    return subject.strategy.state(subject.optimizer)[0]


def train(comm: Communicator, folder: Path, **settings: Any) -> dict[str, Any]:
    """Two epochs: the weights at the end, and the figures of the last one in training and validation."""
    subject = trainer(comm, folder / f"rank{comm.rank}", epochs=2, **settings)
    subject.train_epoch()
    figures = subject.train_epoch()
    return {"weights": weights(subject), "train": figures, "test": subject.evaluate()}


def train_on_two_ranks(comm: Communicator, folder: Path) -> dict[str, Any]:
    """By "plain": batches of 12, 12 and 10; by "more": three of 12 and one of a single sample."""
    own = folder / f"single{comm.rank}"  # as a single process, every rank is the one that writes
    single, ranks = partial(train, SINGLE, own), partial(train, comm, folder)
    return {
        "plain": {
            "sequential": single(**PLAIN),
            "naive": single(parallel="pipeline", **PLAIN),
            "split 5": single(parallel="pipeline", split_size=5, cuts="conv2", **PLAIN),
            "hybrid": ranks(parallel="pipeline", split_size=2, **PLAIN),
            "gpipe": ranks(parallel="gpipe", **PLAIN),
            "1f1b": ranks(parallel="1f1b", microbatches=6, **PLAIN),
        },
        "more": {
            "sequential": single(**MORE),
            "split 1": single(parallel="pipeline", split_size=1, accumulate=3, **MORE),
            "hybrid": ranks(parallel="pipeline", split_size=4, accumulate=2, **MORE),
            "gpipe": ranks(parallel="gpipe", cuts="conv2", channels_last=True, accumulate=3, **MORE),
            "1f1b": ranks(parallel="1f1b", accumulate=2, microbatches=2, **MORE),
        },
    }


def train_in_three_stages(comm: Communicator, folder: Path) -> dict[str, Any]:
    return {
        "plain": {
            "sequential": train(SINGLE, folder / f"single{comm.rank}", **PLAIN),
            "gpipe": train(comm, folder, parallel="gpipe", **PLAIN),
            "1f1b": train(comm, folder, parallel="1f1b", cuts="conv2,fc2", **PLAIN),
        }
    }


def train_one_batch(comm: Communicator, _folder: Path) -> dict[str, Any]:
    """A model with BatchNorm on 10 samples in chunks of 3, 3, 2 and 2: gradients and buffers of each mode."""
    inputs, labels = images(10, 12, 3, torch.float64)[:]

    def model() -> torch.nn.Module:
        return models.build("mnist", shape=(1, 12, 12), classes=4, seed=5).double()

    def state(module: torch.nn.Module) -> dict[str, Tensor]:
        gradients = {f"gradient of {name}": weight.grad for name, weight in module.named_parameters()}
        return {**gradients, **dict(module.named_buffers())}

    def reference(sizes: list[int], *, training: bool) -> dict[str, Tensor]:
        module = model().train(training)
        for chunk, answers in zip(inputs.split(sizes), labels.split(sizes), strict=True):
            (classification().sums(module(chunk), (chunk, answers))[0] / 10).backward()
        return state(module)

    def pipelined(comm: Communicator, mode: str, *, training: bool) -> dict[str, Tensor]:
        split = {"split_size": 3} if mode == "pipeline" else {}
        config = make(dataset="synthetic", batch_size=12, parallel=mode, cuts="norm2", **split)
        strategy = select.build(config, comm, model(), classification(), lambda: (inputs[:2], labels[:2]))
        strategy.module.train(training)
        strategy.train_batch([((inputs, labels), 10)], global_count=10)
        return state(strategy.module)

    return {
        kind: {
            "reference": reference([3, 3, 2, 2] if training else [10], training=training),
            "pipeline": pipelined(SINGLE, "pipeline", training=training),
            "gpipe": pipelined(comm, "gpipe", training=training),
            "1f1b": pipelined(comm, "1f1b", training=training),
        }
        for kind, training in (("training", True), ("eval", False))
    }


def change_modes(comm: Communicator, folder: Path) -> dict[str, Any]:
    """Five epochs, each in another mode that resumes from the snapshot of the one before; and five in one
    process."""
    settings = {"samples": 34, "epochs": 5, "optimizer": "adamw", "lr": 0.01, "scheduler": "cosine"}
    whole = trainer(SINGLE, folder / f"single{comm.rank}", **settings)
    for _ in range(5):
        whole.train_epoch()
    resumed_at = []
    for mode in ("pipeline", "gpipe", "ddp", "1f1b", "pipeline"):
        split = {"split_size": 5} if mode == "pipeline" else {}
        part = trainer(comm, folder / "modes", parallel=mode, **split, **settings)
        part.resume()
        resumed_at.append(part.step)
        part.train_epoch()
        part.save()
    return {"whole": weights(whole), "parts": weights(part), "resumed_at": resumed_at}


def refuse(comm: Communicator, folder: Path) -> dict[str, str]:
    attempts: dict[str, dict[str, Any]] = {
        "few microbatches": {"parallel": "1f1b", "microbatches": comm.world_size - 1},
        "too many cuts": {"parallel": "gpipe", "cuts": "conv2,pool,fc1,fc2"},
    }
    messages = {}
    for name, settings in attempts.items():
        try:
            trainer(comm, folder, samples=34, **settings)
        except TrainError as error:
            messages[name] = str(error)
    return messages


def load_another_model(comm: Communicator, folder: Path) -> str:
    """Only the last stage differs; every rank must refuse."""
    subject = trainer(comm, folder, samples=34, parallel="gpipe")
    model, optimizer = subject.strategy.state(subject.optimizer)
    try:
        subject.strategy.load(subject.optimizer, ({**model, "fc2.bias": torch.zeros(9)}, optimizer))
    except KeyError as error:
        return str(error)
    return "loaded"


CHECKS = {
    2: (*(train_on_two_ranks, train_one_batch), *(change_modes, refuse, load_another_model)),
    3: (train_in_three_stages,),
}


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), CHECKS)
