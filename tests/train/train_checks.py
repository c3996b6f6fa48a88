"""Runs on the ranks: many checks in one job, since starting a job costs more than the checks themselves.

`train_checks.py FOLDER` saves what this rank saw as FOLDER/rank<r>.pt; the tests compare. It must not know what
is right: it only reports.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train import dist, models, parallel, snapshot
from train.config import Config, make
from train.data import Data, Tensors
from train.dist import Ranks
from train.errors import TrainError
from train.main import leave
from train.metrics import Metrics
from train.trainer import Trainer

SAMPLES, TESTS, BATCH = 22, 7, 5  # the last batch has 2 samples: with 3 ranks one of them is idle


def images(samples: int, size: int, seed: int, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, size, size, generator=generator, dtype=dtype)
    return Tensors(inputs, torch.randint(0, 4, (samples,), generator=generator))


def trainer(ranks: Ranks, model: str, size: int, dtype: torch.dtype, **settings: Any) -> Trainer:
    config = make(dataset="synthetic", model=model, batch_size=BATCH, epochs=3, log_every=2, **settings)
    data = Data(
        train=images(SAMPLES, size, 1, dtype),
        test=images(TESTS, size, 2, dtype),
        shape=(1, size, size),
        classes=4,
        prepare=lambda inputs: inputs,
    )
    module = models.build(model, shape=data.shape, classes=4, seed=config.seed).to(dtype)
    if model == "mnist":  # stands for all networks that draw random numbers
        module = torch.nn.Sequential(module, torch.nn.Dropout(0.3))
    config.folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(config.folder, enabled=False, tensorboard=False)
    spread = parallel.build(config, ranks, module, shape=data.shape)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def train_in_double(ranks: Ranks, folder: Path) -> dict[str, Any]:
    subject = trainer(
        ranks,
        "small",
        8,
        torch.float64,
        optimizer="sgd",
        lr=0.05,
        scheduler="cosine",
        out=str(folder / "double"),
    )
    figures = subject.train_epoch()
    subject.fit()
    return {"weights": subject.parallel.module.state_dict(), "epoch": figures, "test": subject.validate()}


def interrupt_and_resume(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A network with BatchNorm and dropout: run through, and by two trainers, the second resuming in mid-epoch."""
    settings = {"optimizer": "adamw", "lr": 0.01, "scheduler": "cosine"}
    whole = trainer(ranks, "mnist", 12, torch.float32, out=str(folder / "whole"), **settings)
    whole.fit()
    first = trainer(ranks, "mnist", 12, torch.float32, out=str(folder / "parts"), save_every=2, **settings)
    first.train_epoch()
    first.train_epoch()  # the newest snapshot is now of step 8 (extra ones at 2, 4, 6, 8), the epoch ends at 10
    second = trainer(ranks, "mnist", 12, torch.float32, out=str(folder / "parts"), **settings)
    second.resume()
    resumed_at = second.step
    second.fit()
    states = [snapshot.load_newest(subject.config.folder, ranks) for subject in (whole, second)]
    compared = ("step", "model", "optimizer")
    whole_state, parts_state = ({name: state[name] for name in compared} for state in states)
    return {"resumed_at": resumed_at, "whole": whole_state, "parts": parts_state}


def elect(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Each rank has a disk of its own. Rank 1 holds step 30; rank 2, where there is one, a torn step 40."""
    disk = folder / f"disk{ranks.rank}"
    disk.mkdir()
    nothing = snapshot.load_newest(disk, ranks)
    step = (10, 30, 40)[ranks.rank]
    snapshot.save(disk, {"step": step, "payload": torch.full((3,), float(step))})
    if ranks.rank == 2:
        whole = (disk / snapshot.NAME).read_bytes()
        (disk / snapshot.NAME).write_bytes(whole[: len(whole) // 2])
    return {"nothing": nothing, "elected": snapshot.load_newest(disk, ranks)}


def meet_a_bad_loss(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One sample, which the last rank takes in the first step, is not a number."""
    subject = trainer(ranks, "small", 8, torch.float32, optimizer="sgd", lr=0.1, out=str(folder / "bad"))
    poisoned = subject.batches.order(0)[ranks.world - 1]
    subject.data.train.inputs[poisoned] = float("nan")
    before = {name: value.clone() for name, value in subject.parallel.module.state_dict().items()}
    try:
        subject.train_epoch()
    except TrainError as error:
        message = str(error)
    after = subject.parallel.module.state_dict()
    return {"message": message, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def meet_endless_gradients(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """In half precision, a loss that is finite with gradients that are not: in two steps of the first epoch; then, in
    a run that goes on from there, in every step."""
    settings = {"optimizer": "sgd", "lr": 0.1, "amp": "fp16", "out": str(folder / "endless")}
    first = trainer(ranks, "small", 8, torch.float32, **settings)
    first.parallel.scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**-6)
    first.score = without_end(first, {1, 2})
    told = first.train_epoch()
    first.save()
    second = trainer(ranks, "small", 8, torch.float32, **settings)
    second.resume()
    second.score = without_end(second, set(range(15)))
    before = {name: value.clone() for name, value in second.parallel.module.state_dict().items()}
    try:
        second.fit()
    except TrainError as error:
        message = str(error)
    after = second.parallel.module.state_dict()
    return {
        "told": told["skipped_steps"],
        "message": message,
        "skipped": second.skipped,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def without_end(subject: Trainer, steps: set[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """The score, its gradient being that of a root at 0 in these steps."""
    score = subject.score

    def rooted(scores: Tensor, labels: Tensor) -> Tensor:
        return score(scores + (scores * 0).abs().sqrt() if subject.step in steps else scores, labels)

    return rooted


def take_turns(ranks: Ranks, folder: Path) -> dict[str, Any]:
    marker = folder / "prepared"

    def prepare() -> bool:
        if ranks.place.local_rank == 0:
            marker.touch()
        return marker.exists()

    def fail_on_the_last() -> None:
        if ranks.rank == ranks.world - 1:
            raise TrainError("this one's own words")

    seen = ranks.in_turn(prepare, what="prepare")
    try:
        ranks.in_turn(fail_on_the_last, what="find the file")
    except TrainError as error:
        message = str(error)
    return {
        "seen": seen,
        "message": message,
        "gathered": ranks.gather(10 * ranks.rank),
        "any": [ranks.any(ranks.rank == ranks.world - 1), ranks.any(False)],
        "shared": ranks.share(
            b"\x00state" if ranks.rank == ranks.world - 1 else None, source=ranks.world - 1
        ),
    }


CHECKS = (
    train_in_double,
    interrupt_and_resume,
    elect,
    meet_a_bad_loss,
    meet_endless_gradients,
    take_turns,
)


def main(folder: Path) -> None:
    config: Config = make(dataset="synthetic", timeout=60.0)
    place = dist.find_place(config, os.environ)
    with dist.join(config, place) as ranks:
        seen: dict[str, Any] = {check.__name__: check(ranks, folder) for check in CHECKS}
        if ranks.rank == ranks.world - 1:
            time.sleep(0.3)
            (folder / "done").touch()
    seen["left after the last"] = (folder / "done").exists()
    torch.save(seen, folder / f"rank{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
