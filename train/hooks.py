"""What happens around the steps of the training loop: each a component of its own, called in the order in
which they are given.

A hook runs on every rank, at the same steps, so it may use collective operations. The loop itself knows none
of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from train.config import Config
from train.distributed.communicator import Communicator
from train.metrics.running_stats import RunningStats
from train.parallel.strategy import Strategy


class Run(Protocol):
    """What a hook sees of the run: trainer.Trainer."""

    config: Config
    comm: Communicator
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    stats: RunningStats
    step: int
    """Steps done."""
    evaluated_step: int
    """Of the last evaluation that was reported."""
    resumed: bool
    stopping: bool
    """Whether a rank has received SIGTERM."""

    @property
    def epoch(self) -> int:
        """Epochs done, the last one perhaps in part."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def total_steps(self) -> int: ...

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the step just done is the last one of its epoch, or of the run."""
        ...

    def figures(self, sums: Tensor, steps: int) -> dict[str, float]:
        """Return the sums over the ranks of some steps as means and rates."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the progress of the run, for status.json."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the metrics on the test set."""
        ...

    def save_and_stop(self) -> None:
        """Save a snapshot and raise `Preempted`."""
        ...


class Hook:
    """Does nothing; the base class of hooks."""

    def begin_epoch(self, run: Run) -> None:
        """The first batch of the epoch, or of the rest of it, is about to be loaded."""

    def before_step(self, run: Run) -> None:
        """A batch has been loaded."""

    def after_step(self, run: Run) -> None:
        """The weights have been updated; run.step counts this step."""

    def evaluation(self, _run: Run) -> AbstractContextManager[object]:
        """Return a context in which the model is evaluated."""
        return nullcontext()

    def after_evaluation(self, run: Run, figures: dict[str, float]) -> None:
        """The model has been evaluated; still inside the context of `evaluation`."""

    def after_epoch(self, run: Run, figures: dict[str, float]) -> None:
        """An epoch, or the run, has been evaluated for the first time. A snapshot is saved afterwards."""

    def status(self) -> dict[str, Any]:
        """Return what status.json shows of this hook."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a snapshot keeps of this hook: numbers, texts, and lists of them. Collective."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned. Not called where the snapshot has nothing of this hook."""

    def after_resume(self, run: Run) -> None:
        """The run has continued from a snapshot. Collective."""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that a snapshot keeps, and into which it is loaded."""
        return {}

    def close(self) -> None:
        """The run ends, whatever the reason."""


class EverySteps(Hook):
    """Calls a function after every so many steps, but not after the last one of an epoch: that has its own
    end."""

    def __init__(self, every: int, work: Callable[[], object]) -> None:
        self.every, self.work = every, work

    def after_step(self, run: Run) -> None:
        if run.step % self.every == 0 and not run.at_end_of_epoch:
            with run.stats.timer.paused():
                self.work()


class EvaluateWithinEpoch(Hook):
    """--eval-every: evaluates after every so many steps, but not after the last one of an epoch, which is
    evaluated anyway."""

    def __init__(self, every: int) -> None:
        self.every = every

    def begin_epoch(self, run: Run) -> None:
        self._evaluate(run)  # in a resumed run whose snapshot was saved between the step and its evaluation

    def after_step(self, run: Run) -> None:
        self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        due = run.step > 0 and run.step % self.every == 0 and not run.at_end_of_epoch
        if due and run.evaluated_step < run.step:
            with run.stats.timer.paused():
                run.evaluate()
            run.evaluated_step = run.step


class StopOnRequest(Hook):
    """Saves a snapshot and ends the run once a rank has received SIGTERM."""

    def after_step(self, run: Run) -> None:
        if run.stopping:
            run.save_and_stop()


class FaultInjection(Hook):
    """--fail-rank: ends this rank before a step like a crash, without clean-up, to test recovery; not in a
    run that was resumed."""

    def before_step(self, run: Run) -> None:
        flags, rank = run.config.faults, run.comm.rank
        if run.resumed or rank != flags.fail_rank or run.step + 1 != flags.fail_step:
            return
        print(f"rank {rank} exits with code {flags.fail_code} (--fail-rank)", file=sys.stderr, flush=True)
        os._exit(flags.fail_code)
