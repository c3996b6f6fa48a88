"""Checks for test_train_modes.py: a transformer, and options that must not change what is computed. `modes_checks.py FOLDER`
runs on each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from support.training.check_job import run_checks
from support.training.small_trainer import small_trainer
from torch import Tensor

from train.config import make
from train.data.datasets import load
from train.distributed.communicator import Communicator
from train.parallel.whole import whole
from train.trainer import Trainer

TEXT = {"model": "transformer", "batch_size": 6, "epochs": 1, "optimizer": "adamw", "lr": 0.01}


def trainer(comm: Communicator, out: Path, **flags: Any) -> Trainer:
    data = load(make(dataset="text", synthetic_size=32), download=False)
    settings = {**TEXT, **flags}
    return small_trainer(comm, out, data=data, dtype=torch.float64, **settings)


def weights(subject: Trainer) -> dict[str, Tensor]:
    state = subject.strategy.module.state_dict()
    return {name: whole(value).clone() for name, value in state.items()}


def transformer(comm: Communicator, folder: Path) -> dict[str, Any]:
    """An epoch in each mode, clipped, and its evaluation."""
    modes: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}}
    if comm.world_size > 1:
        modes["tensor"] = {"parallel": "tensor", "group_size": 2}
        modes["hsdp"] = {"parallel": "hsdp", "group_size": 2}
    results = {}
    for name, flags in modes.items():
        subject = trainer(comm, folder / name, clip=0.3, **{"parallel": name, **flags})
        subject.train_epoch()
        results[name] = {"weights": weights(subject), "test": subject.evaluate()}
    return results


def recomputed(comm: Communicator, folder: Path) -> dict[str, dict[str, Tensor]]:
    """A model with BatchNorm and dropout, with and without its activations kept."""
    results = {}
    for parallel in ("ddp", "fsdp"):
        for again in (False, True):
            subject = small_trainer(
                comm, folder / "recompute", model="mnist", parallel=parallel, epochs=1, dtype=torch.float64,
                activation_checkpointing=again, dropout=0.3, optimizer="sgd", lr=0.05,
            )  # fmt: skip
            subject.train_epoch()
            results[f"{parallel} {again}"] = weights(subject)
    return results


def averaged(comm: Communicator, folder: Path) -> dict[str, Any]:
    """The average of the weights in two modes, in an uninterrupted run, and in one that is resumed, in the background."""
    results: dict[str, Any] = {}
    for parallel, kind in (("ddp", "full"), ("fsdp", "full"), ("fsdp", "sharded")):
        flags = {
            "ema": 0.9, "parallel": parallel, "snapshot": kind, "snapshot_async": True, "epochs": 2,
            "optimizer": "sgd", "lr": 0.05, "dtype": torch.float64,
        }  # fmt: skip
        out = folder / f"{parallel} {kind}"
        subject = small_trainer(comm, out / "whole", **flags)
        subject.fit()
        parts = [small_trainer(comm, out / "parts", **flags, max_steps=steps) for steps in (4, 0)]
        for part in parts:
            part.resume()
            part.fit()
        results[f"{parallel} {kind}"] = [
            {name: whole(value).clone() for name, value in one._tensors().items()}
            for one in (subject, parts[1])
        ]
        results[f"{parallel} {kind} test"] = [subject.result, parts[1].result]
    return results


CHECKS = {
    1: (transformer,),
    2: (transformer, recomputed, averaged),
    4: (transformer,),
}


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), CHECKS, parallel="fsdp")
