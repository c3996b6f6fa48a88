"""Several runs of a Trainer on each rank, one of which may get SIGTERM in the middle of an epoch.

`resume_checks.py JSON` takes the fields of `Task`. Each rank saves what it saw as REPORT.<rank>.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.training.small_trainer import BATCH, SAMPLES, small_trainer
from torch import Tensor

from train.config import make
from train.data.datasets import Datasets, InMemoryDataset
from train.distributed.communicator import Communicator
from train.distributed.process_group import join
from train.distributed.rank_info import find_rank
from train.errors import Preempted
from train.process_exit import exit_process
from train.record.output import RunOutput
from train.signals import StopRequest, handle_stop_signals
from train.task import classification
from train.trainer import Trainer

EPOCHS, SIZE = 3, 12


@dataclass(frozen=True, kw_only=True)
class Task:
    """`runs` are settings by name. In step `stop` (from 0) the last rank gets SIGTERM. Rank r uses disk
    number r + `shift` of `disks`; with 0 disks all ranks share one."""

    out: str
    report: str
    runs: dict[str, dict[str, Any]]
    stop: int = -1
    disks: int = 0
    shift: int = 0
    dropout: float = 0.3


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    config = make(dataset="synthetic", timeout=60.0)
    with join(config, find_rank(config, os.environ)) as comm:
        report = {name: run(task, name, comm) for name in task.runs}
        torch.save(report, f"{task.report}.{comm.rank}")
    exit_process(0)


def run(task: Task, name: str, comm: Communicator) -> dict[str, Any]:
    """Return what this rank saw of the run `name`."""
    disk = f"disk{(comm.rank + task.shift) % task.disks}" if task.disks else "shared"
    with handle_stop_signals() as stop:
        out = Path(task.out, name, disk)
        metrics = RunOutput(out, enabled=comm.is_main)
        subject = trainer(task, name, comm, out, stop, metrics)
        used = record_samples(subject)
        subject.resume()
        resumed_at = subject.step
        metrics.open(subject.step, evaluated=subject.evaluated_step)
        try:
            subject.fit()
        except Preempted:
            pass
        metrics.close()
    return {
        "resumed_at": resumed_at,
        "step": subject.step,
        "used": used,
        "test_loss": subject.result.get("test_loss"),
    }


def trainer(
    task: Task, name: str, comm: Communicator, out: Path, stop: StopRequest, metrics: RunOutput
) -> Trainer:
    def preprocess(batch: Any) -> Any:
        if subject.step == task.stop and comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    data = Datasets(
        train=images(SAMPLES),
        test=images(7),
        task=classification(),
        shape=(1, SIZE, SIZE),
        classes=SAMPLES,
        preprocess=preprocess,
    )
    settings = {"model": "mnist", "batch_size": BATCH, "epochs": EPOCHS, "log_every": 2, **task.runs[name]}
    subject = small_trainer(
        comm, out, data=data, dropout=task.dropout, stop=stop, metrics=metrics, **settings
    )
    return subject


def images(samples: int) -> InMemoryDataset:
    """Each sample has its own class, so that labels identify the samples that were used."""
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 1, SIZE, SIZE, generator=generator)
    return InMemoryDataset(inputs, torch.arange(samples))


def record_samples(subject: Trainer) -> dict[int, list[int]]:
    """Return a dictionary step -> samples that this rank trains on, filled in during the run."""
    used: dict[int, list[int]] = {}
    task = subject.strategy.task

    def recorded(scores: Tensor, batch: Any) -> Tensor:
        if subject.strategy.module.training:
            used[subject.step] = batch[1].tolist()  # in the first step DDP's buckets warm up, too
        return task.loss(scores, batch)

    subject.strategy.task = dataclasses.replace(task, loss=recorded)
    return used


if __name__ == "__main__":
    main()
