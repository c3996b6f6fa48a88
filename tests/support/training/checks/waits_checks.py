"""Checks for test_train_waits.py: what the host waits for in the loop, step by step. `waits_checks.py FOLDER`
runs on each rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from support.training.check_job import run_checks
from support.training.small_trainer import small_trainer
from support.training.waits import Collectives, CountWaits, counted_collectives

from train.distributed.communicator import Communicator
from train.errors import Preempted
from train.hooks import Hook, Run
from train.signals import StopRequest

STOP_AT = 3
FLAGS = {
    "plain": {"optimizer": "sgd"},
    "more": {"optimizer": "adamw", "clip": 1.0, "augment": True, "accumulate": 2, "ema": 0.9, "amp": "bf16"},
}


class Recorder(Hook):
    """Keeps the counts at each step. The last rank is asked to stop before the step `stop`."""

    def __init__(self, waits: CountWaits, collectives: Collectives, request: StopRequest, stop: int) -> None:
        self.waits, self.collectives, self.request, self.stop = waits, collectives, request, stop
        self.counts = [self.count()]

    def count(self) -> tuple[int, int, int]:
        return self.waits.count, self.collectives.blocking, self.collectives.background

    def begin_epoch(self, _run: Run) -> None:
        self.counts = [self.count()]

    def before_step(self, run: Run) -> None:
        if run.step + 1 == self.stop and run.comm.rank == run.comm.world_size - 1:
            self.request.received = True

    def after_step(self, _run: Run) -> None:
        self.counts.append(self.count())

    def per_step(self) -> list[tuple[int, ...]]:
        pairs = zip(self.counts, self.counts[1:], strict=False)
        return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairs]


def run(comm: Communicator, out: Path, *, stop: int = 0, **flags: Any) -> dict[str, Any]:
    """The counts of each step (what waits for the device, and for ranks; what is awaited later), and where it
    stopped."""
    request = StopRequest()
    subject = small_trainer(comm, out, epochs=1, stop=request, **{"log_every": 0, **flags})
    with CountWaits() as waits, counted_collectives() as collectives:
        recorder = Recorder(waits, collectives, request, stop)
        # Before the hook that stops the run, but after those of the step.
        subject.hooks.insert(0, recorder)
        try:
            subject.fit()
        except Preempted:
            return {"steps": recorder.per_step(), "stopped": subject.step}
    return {"steps": recorder.per_step(), "stopped": None}


def loop(comm: Communicator, folder: Path) -> dict[str, Any]:
    return {name: run(comm, folder / name, **flags) for name, flags in FLAGS.items()}


def stopped_loop(comm: Communicator, folder: Path) -> dict[str, Any]:
    return run(comm, folder / "stopped", stop=STOP_AT, optimizer="sgd")


def logging_loop(comm: Communicator, folder: Path) -> dict[str, Any]:
    return run(comm, folder / "logging", optimizer="sgd", log_every=2)


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), (loop, stopped_loop, logging_loop))
