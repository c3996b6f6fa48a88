"""Checks for test_train_fsdp.py. `fsdp_checks.py FOLDER SHARED` runs on each rank.

SHARED holds the snapshots that a job of two ranks leaves for the others.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.training.check_job import run_checks
from support.training.small_trainer import CLASSES, datasets, single_process, small_trainer
from torch import Tensor, nn

from train import models
from train.checkpoint import sharded
from train.distributed.communicator import Communicator
from train.errors import TrainError
from train.trainer import Trainer

SGD = {"optimizer": "sgd", "lr": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "two parts, smoothed": {"accumulate": 2, "label_smoothing": 0.1},
    "three parts, clipped": {"accumulate": 3, "clip": 0.3},  # a rank often has fewer samples than parts
}
# --snapshot, and the modes that write and that read
CONVERSIONS = [("sharded", "fsdp", "fsdp"), ("sharded", "fsdp", "ddp"), ("sharded", "ddp", "fsdp")]
CONVERSIONS += [("full", "fsdp", "ddp"), ("full", "ddp", "fsdp")]


class Listed(nn.Module):
    """Not a sequence: parameters of its own, and layers in a list, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.blocks = nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.flatten(1) * self.scale
        for block in self.blocks:
            values = block(values).relu()
        return self.head(values)


def trainer(comm: Communicator, kind: str, dtype: torch.dtype, out: Path, **settings: Any) -> Trainer:
    if kind == "listed":
        torch.manual_seed(0)
        return small_trainer(comm, out, module=Listed(), dtype=dtype, **settings)
    model = "small" if kind == "small" else "mnist"
    data = datasets(12 if model == "mnist" else 8, dtype=dtype)
    module = models.build(model, shape=data.shape, classes=CLASSES, seed=0)
    if kind == "mnist":  # stands for all models that draw random numbers
        module.add_module("dropout", nn.Dropout(0.3))
    return small_trainer(comm, out, model=model, data=data, module=module, dtype=dtype, **settings)


def whole_weights(subject: Trainer) -> dict[str, Tensor]:
    """Return the whole model, on every rank."""
    state = subject.strategy.module.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def train_epoch(
    comm: Communicator, folder: Path, kind: str, dtype: torch.dtype, mode: str, **settings: Any
) -> dict[str, Any]:
    """One epoch and a validation."""
    subject = trainer(comm, kind, dtype, folder / "epoch", epochs=1, parallel=mode, **{**SGD, **settings})
    subject.train_epoch()
    return {"test": subject.evaluate(), "weights": whole_weights(subject)}


def train_in_both_modes(comm: Communicator, folder: Path, _shared: Path) -> dict[str, Any]:
    """The same training with fsdp, with ddp, and by each rank alone."""
    double = torch.float64

    def train(comm: Communicator, mode: str, folder: Path = folder) -> dict[str, Any]:
        results = {
            name: train_epoch(comm, folder, "small", double, mode, **flags)
            for name, flags in VARIANTS.items()
        }
        results["batchnorm"] = train_epoch(comm, folder, "mnist", double, mode, accumulate=2)
        results["list of layers"] = train_epoch(comm, folder, "listed", double, mode)
        return results

    alone = train(single_process(), "ddp", folder / f"single{comm.rank}")
    return {"alone": alone, "ddp": train(comm, "ddp"), "fsdp": train(comm, "fsdp")}


def count_elements(comm: Communicator, folder: Path, _shared: Path) -> dict[str, int]:
    out = folder / "count"
    subject = trainer(comm, "small", torch.float32, out, epochs=1, parallel="fsdp", optimizer="adamw")
    subject.train_epoch()
    parameters = list(subject.strategy.module.parameters())
    moments = [state["exp_avg"] for state in subject.optimizer.state.values()]
    return {
        "whole model": sum(p.numel() for p in parameters),
        "parameters": sum(p.to_local().numel() for p in parameters),
        "moments": sum(moment.to_local().numel() for moment in moments),
    }


def compute_in_bf16(comm: Communicator, folder: Path, _shared: Path) -> dict[str, Any]:
    """The dtype in which the weights are used, and whether gradients are averaged with higher precision."""
    subject = trainer(comm, "mnist", torch.float32, folder / "bf16", parallel="fsdp", amp="bf16")
    used = []
    for name in ("conv1", "norm1"):
        layer = subject.strategy.module.get_submodule(name)
        layer.register_forward_pre_hook(lambda layer, _inputs: used.append(layer.weight.dtype))
    subject.train_step(*next(subject.train_reader.batches()))
    gradient = subject.strategy.module.get_parameter("fc1.weight").grad.to_local()
    return {"used": used, "float32 gradients": bool((gradient.bfloat16().float() != gradient).any())}


def interrupt_and_resume(comm: Communicator, folder: Path, _shared: Path) -> dict[str, Any]:
    """A model with BatchNorm and dropout: run through, and by two trainers, the second resuming in
    mid-epoch."""
    settings = {"parallel": "fsdp", "snapshot": "sharded", "epochs": 2, "optimizer": "adamw", "lr": 0.01}
    whole = trainer(comm, "mnist", torch.float32, folder / "whole", **settings)
    whole.fit()
    first = trainer(comm, "mnist", torch.float32, folder / "parts", save_every=4, **settings)
    first.train_epoch()
    first.train_epoch()  # the newest snapshot is of step 8, and the epoch ends at 10
    second = trainer(comm, "mnist", torch.float32, folder / "parts", **settings)
    second.resume()
    resumed_at = second.step
    second.fit()
    states = [subject.strategy.state(subject.optimizer) for subject in (whole, second)]
    return {
        "resumed_at": resumed_at,
        "folders": folder_names(folder / "parts"),
        "whole": [whole_weights(whole), *states[0]],
        "parts": [whole_weights(second), *states[1]],
    }


def resume_elsewhere(comm: Communicator, _folder: Path, shared: Path) -> dict[str, Any]:
    """Two ranks leave a snapshot of each mode in mid-epoch; any number of ranks resumes from it in each
    mode."""
    results = {}
    dtype = torch.float64
    for kind, writer, reader in CONVERSIONS:
        settings = {**SGD, "snapshot": kind, "epochs": 2, "save_every": 4}
        uninterrupted = f"{kind} {writer}"
        out = shared / uninterrupted
        if comm.world_size == 2 and uninterrupted not in results:
            subject = trainer(comm, "small", dtype, out, parallel=writer, **settings)
            subject.train_epoch()
            subject.train_epoch()  # the newest snapshot is of step 8, and the epoch ends at 10
            results[uninterrupted] = whole_weights(subject)
        subject = trainer(comm, "small", dtype, out, parallel=reader, **settings)
        subject.resume()
        assert subject.step == 8
        subject.train_epoch()
        results[f"{uninterrupted} to {reader}"] = whole_weights(subject)
    return results


def fail_together(comm: Communicator, folder: Path, _shared: Path) -> dict[str, Any]:
    """What every rank reports when the disk of the last one is full, when a file of it is damaged, and when
    the ranks see different folders."""
    settings = {**SGD, "parallel": "fsdp", "snapshot": "sharded", "epochs": 1}
    out = folder / "full"

    def small(out: Path, **more: Any) -> Trainer:
        return trainer(comm, "small", torch.float32, out, **{**settings, **more})

    subject = small(out)
    subject.step = 1
    subject.save()
    subject.step = 2
    report: dict[str, Any] = {}
    with small_files_on_last_rank(comm):
        report["full"] = message_of(subject.save)
        comm.any(True)  # rank 0 has removed its draft
    report["left"] = folder_names(out)
    comm.any(True)  # all have read it
    draft = out / sharded.UNFINISHED
    if comm.is_main:
        draft.touch()  # a file where the folder should be
    report["blocked"] = message_of(subject.save)
    if comm.is_main:
        draft.unlink()
    subject.save()
    damage_part_of_last_rank(comm, out / "snapshot-2.dcp")
    found = sharded.find_newest(out, comm)
    report["found"] = found and found["step"]
    report["not shared"] = message_of(small(folder / f"alone{comm.rank}").resume)
    report["other kind"] = message_of(small(out, snapshot="full").resume)
    report["other model"] = message_of(trainer(comm, "listed", torch.float32, out, **settings).resume)
    report["probes"] = [path.name for path in folder.glob("*/.shared-*")]
    fresh = small(out, fresh=True)
    fresh.resume()
    return {**report, "fresh": (fresh.step, folder_names(out))}


@contextmanager
def small_files_on_last_rank(comm: Communicator) -> Iterator[None]:
    """Limit files to 5,000 bytes on the last rank inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damage_part_of_last_rank(comm: Communicator, snapshot: Path) -> None:
    if comm.rank == comm.world_size - 1:
        path = snapshot / f"__{comm.rank}_0.distcp"
        content = path.read_bytes()
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    comm.any(True)


def folder_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.dcp"))


def message_of(work: Callable[[], object]) -> str:
    try:
        work()
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


CHECKS = {
    2: (train_in_both_modes, compute_in_bf16, resume_elsewhere),
    3: (count_elements, interrupt_and_resume, resume_elsewhere, fail_together),
}


if __name__ == "__main__":
    out, shared = map(Path, sys.argv[1:])
    run_checks(out, CHECKS, shared, parallel="fsdp")
