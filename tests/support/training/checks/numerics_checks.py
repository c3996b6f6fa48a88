"""Checks for test_train_numerics.py. `numerics_checks.py FOLDER` runs on each rank."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch
from support.training.check_job import run_checks
from support.training.small_trainer import single_process, small_trainer
from torch import Tensor

from train.checkpoint import full
from train.distributed.communicator import Communicator
from train.errors import TrainError
from train.trainer import Trainer


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


CHECKS = (train_in_double_precision, train_alone, interrupt_and_resume, elect_snapshot, train_on_nan)
CHECKS += (overflow_in_half_precision, run_collectives, finish_last)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    run_checks(out, CHECKS, after=lambda _: (out / "last rank has finished").exists())
