"""Checks for test_train_modes.py: a transformer, and options that must not change what is computed.
`modes_checks.py FOLDER` runs on each rank."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from support.training.check_job import run_checks
from support.training.small_trainer import single_process, small_trainer
from torch import Tensor

from train.checkpoint.best import read_best
from train.checkpoint.snapshots import whole
from train.config import make
from train.data.datasets import load
from train.distributed.communicator import Communicator
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

    def train(comm: Communicator, folder: Path, **flags: Any) -> dict[str, Any]:
        subject = trainer(comm, folder, clip=0.3, **flags)
        subject.train_epoch()
        return {"weights": weights(subject), "test": subject.evaluate()}

    modes: dict[str, dict[str, Any]] = {"fsdp": {}, "hsdp": {"group_size": 2}, "tensor": {"group_size": 2}}
    results = {name: train(comm, folder / name, parallel=name, **flags) for name, flags in modes.items()}
    alone = {"alone": train(single_process(), folder / "single")} if comm.rank == 0 else {}
    return {**results, **alone}


def recomputed(comm: Communicator, folder: Path) -> dict[str, dict[str, Tensor]]:
    """A model with BatchNorm and dropout, with and without its activations kept."""
    results = {}
    for parallel in ("ddp", "fsdp"):
        for again in (False, True):
            subject = small_trainer(
                comm,
                folder / "recompute",
                model="mnist",
                parallel=parallel,
                epochs=1,
                dtype=torch.float64,
                activation_checkpointing=again,
                dropout=0.3,
                optimizer="sgd",
                lr=0.05,
            )
            subject.train_epoch()
            results[f"{parallel} {again}"] = weights(subject)
    return results


def averaged(comm: Communicator, folder: Path) -> dict[str, Any]:
    """The average of the weights in two modes, in an uninterrupted run, and in one that is resumed, in the
    background."""
    results: dict[str, Any] = {}
    for parallel, kind in (("ddp", "full"), ("fsdp", "sharded")):
        flags = {
            "ema": 0.9,
            "parallel": parallel,
            "snapshot": kind,
            "snapshot_async": True,
            "epochs": 2,
            "optimizer": "sgd",
            "lr": 0.05,
            "dtype": torch.float64,
        }
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


BEST = {
    "ddp": {"snapshot_per_node": True},
    "fsdp sharded": {"parallel": "fsdp", "snapshot": "sharded"},
    "pipeline": {"parallel": "pipeline"},
    "gpipe": {"parallel": "gpipe", "microbatches": 1},
}


def best(comm: Communicator, folder: Path) -> dict[str, Any]:
    """What the ranks, each a node of its own, write to best.pt, and the evaluations of a run that has read
    it."""
    results = {}
    for name, flags in BEST.items():
        node = dataclasses.replace(comm.info, local_rank=0)
        per_node = f"node{comm.rank}" if flags.get("snapshot_per_node") else "shared"
        settings = {
            "epochs": 2,
            "optimizer": "sgd",
            "lr": 0.05,
            "best_metric": "loss",
            "eval_every": 2,
            **flags,
        }
        own = dataclasses.replace(comm, info=node)
        out = folder / "best" / name / per_node
        subject = small_trainer(own, out, dtype=torch.float64, **settings)
        subject.fit()
        kept = read_best(out, own)
        other = small_trainer(own, out, dtype=torch.float64, **{**settings, "seed": 5})
        if kept is not None:
            other.strategy.load_model(kept["model"])
        results[name] = {"status": subject.status(), "again": other.evaluate()}
    return results


CHECKS = {2: (recomputed, averaged, best), 4: (transformer,)}


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), CHECKS, parallel="fsdp")
