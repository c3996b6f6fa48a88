"""Checks for test_train_numerics.py. `numerics_checks.py FOLDER` runs on each rank. References without ranks
are computed here, some in plain PyTorch without the Trainer."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from support.training.check_job import run_checks
from support.training.small_trainer import BATCH, CLASSES, SAMPLES, images, single_process, small_trainer
from torch import Tensor, nn

from train import models
from train.checkpoint import full
from train.data.datasets import Datasets
from train.data.sampler import GlobalBatchSampler
from train.distributed.communicator import Communicator
from train.errors import TrainError
from train.task import classification
from train.trainer import Trainer

EPOCHS = 2
PARTS = (1, 4)
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def state_copy(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.module.state_dict().items()}


def unchanged(trainer: Trainer, before: dict[str, Tensor]) -> bool:
    after = trainer.strategy.module.state_dict()
    return all(torch.equal(before[name], after[name]) for name in before)


def train_alone(comm: Communicator, folder: Path) -> dict[str, Any]:
    """The same as `train_in_double_precision`, by each rank for itself."""
    return train_in_double_precision(single_process(), folder / f"single{comm.rank}")


def train_in_double_precision(comm: Communicator, folder: Path) -> dict[str, Any]:
    settings = {"optimizer": "sgd", "lr": 0.05, "scheduler": "cosine", "epochs": 3, "log_every": 2}
    trainer = small_trainer(comm, folder / "double", dtype=torch.float64, **settings)
    figures = trainer.train_epoch()
    trainer.fit()
    return {"weights": trainer.strategy.module.state_dict(), "epoch": figures, "test": trainer.evaluate()}


def interrupt_and_resume(comm: Communicator, folder: Path) -> dict[str, Any]:
    """A model with BatchNorm and dropout, in float16: run through, and by two trainers, the second resuming
    in mid-epoch."""

    def trainer(name: str, **more: Any) -> Trainer:
        settings = {"optimizer": "adamw", "lr": 0.01, "scheduler": "cosine", "epochs": 3, "log_every": 2}
        settings |= {"warmup_epochs": 0.6, "accumulate": 2, "amp": "fp16", "clip": 1.0}
        return small_trainer(comm, folder / name, model="mnist", dropout=0.3, **settings, **more)

    whole = trainer("whole")
    whole.fit()
    first = trainer("parts", save_every=2)
    first.train_epoch()
    # the newest snapshot is now of step 8 (after 2, 4, 6 and 8), and the epoch ends at 10
    first.train_epoch()
    second = trainer("parts")
    second.resume()
    resumed_at = second.step
    second.fit()
    states = [full.load_newest(one.config.folder, comm) for one in (whole, second)]
    compared = ("step", "model", "optimizer", "scaler")
    whole_state, parts_state = ({name: state[name] for name in compared} for state in states if state)
    return {"resumed_at": resumed_at, "whole": whole_state, "parts": parts_state}


def elect_snapshot(comm: Communicator, folder: Path) -> dict[str, Any]:
    """Each rank has a disk of its own. Rank 1 holds step 30; rank 2, if there is one, a truncated step 40."""
    disk = folder / f"disk{comm.rank}"
    disk.mkdir()
    from_nothing = full.load_newest(disk, comm)
    step = (10, 30, 40)[comm.rank]
    full.save(disk, {"step": step, "payload": torch.full((3,), float(step))})
    if comm.rank == 2:
        whole = (disk / full.NAME).read_bytes()
        (disk / full.NAME).write_bytes(whole[: len(whole) // 2])
    return {"from nothing": from_nothing, "elected": full.load_newest(disk, comm)}


def train_on_nan(comm: Communicator, folder: Path) -> dict[str, Any]:
    """One sample, which the last rank takes in the first step, is NaN."""
    trainer = small_trainer(comm, folder / "nan", optimizer="sgd", lr=0.1, epochs=3)
    poisoned = trainer.train_reader.sampler.order(0)[comm.world_size - 1]
    trainer.datasets.train.inputs[poisoned] = float("nan")
    before = state_copy(trainer)
    try:
        trainer.train_epoch()
    except TrainError as error:
        message = str(error)
    return {"message": message, "unchanged": unchanged(trainer, before)}


def overflow_in_half_precision(comm: Communicator, folder: Path) -> dict[str, Any]:
    """A finite loss with infinite gradients: in two steps of the first epoch; then, in a resumed run, in
    every step."""
    settings = {"optimizer": "sgd", "lr": 0.1, "amp": "fp16", "epochs": 3}
    first = small_trainer(comm, folder / "overflow", **settings)
    first.strategy.scaler = torch.amp.GradScaler(comm.device.type, init_scale=2.0**-6)
    with_infinite_gradients(first, {1, 2})
    figures = first.train_epoch()
    first.save()
    second = small_trainer(comm, folder / "overflow", **settings)
    second.resume()
    with_infinite_gradients(second, set(range(15)))
    before = state_copy(second)
    try:
        second.fit()
    except TrainError as error:
        message = str(error)
    return {
        "reported": figures["skipped_steps"],
        "message": message,
        "skipped": second.skipped_steps,
        "unchanged": unchanged(second, before),
    }


def with_infinite_gradients(trainer: Trainer, steps: set[int]) -> None:
    """Change the loss so that its gradient in these steps is that of a square root at 0."""
    task = trainer.strategy.task

    def changed(scores: Tensor, batch: Any) -> Tensor:
        infinite = scores + (scores * 0).abs().sqrt() if trainer.step in steps else scores
        return task.loss(infinite, batch)

    trainer.strategy.task = dataclasses.replace(task, loss=changed)


def run_collectives(comm: Communicator, folder: Path) -> dict[str, Any]:
    last = comm.rank == comm.world_size - 1
    marker = folder / "prepared"

    def prepare() -> bool:
        if comm.local_rank == 0:
            marker.touch()
        return marker.exists()

    def fail_on_the_last_rank() -> None:
        if last:
            raise TrainError("the last rank's own message")

    prepared = comm.local_rank_0_first(prepare, what="prepare")
    try:
        comm.local_rank_0_first(fail_on_the_last_rank, what="find the file")
    except TrainError as error:
        message = str(error)
    return {
        "prepared": prepared,
        "message": message,
        "gathered": comm.gather(10 * comm.rank),
        "any": [comm.any(last), comm.any(False)],
        "broadcast": comm.broadcast_bytes(b"\x00state" if last else None, source=comm.world_size - 1),
    }


def finish_last(comm: Communicator, folder: Path) -> None:
    """The last rank finishes later than the others."""
    if comm.rank == comm.world_size - 1:
        time.sleep(0.3)
        (folder / "last rank has finished").touch()


# -- options that change how a step is computed, and not its result ------------------------------------------


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
    return state_copy(trainer)


def reference_model(name: str, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = models.build(name, shape=(1, size, size), classes=CLASSES, seed=0).double()
    return module, torch.optim.SGD(module.parameters(), **SGD)


SAMPLER = GlobalBatchSampler(samples=SAMPLES, batch_size=BATCH, seed=0)


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
    before = state_copy(subject)
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


CHECKS = (train_in_double_precision, train_alone, interrupt_and_resume, elect_snapshot, train_on_nan)
CHECKS += (overflow_in_half_precision, run_collectives, accumulated, clipped, clipped_reference)
CHECKS += (with_batchnorm, batchnorm_reference, validated, reductions, finish_last)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    run_checks(out, CHECKS, after=lambda _: (out / "last rank has finished").exists())
