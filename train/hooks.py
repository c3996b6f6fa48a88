"""What happens around the steps of the training loop: each a component of its own, called in the order in which they are given.

A hook runs on every rank, at the same steps, so it may use collective operations. The loop itself knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from train.fault_injection import exit_if_requested

if TYPE_CHECKING:
    from train.trainer import Trainer


class Hook:
    """Does nothing; the base class of hooks."""

    def begin_epoch(self, trainer: Trainer) -> None:
        """The first batch of the epoch, or of the rest of it, is about to be loaded."""

    def before_step(self, trainer: Trainer) -> None:
        """A batch has been loaded."""

    def after_step(self, trainer: Trainer) -> None:
        """The weights have been updated; trainer.step counts this step."""

    def after_evaluation(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """The model has been evaluated."""

    def state(self) -> dict[str, Any]:
        """Return what a snapshot keeps of this hook, in numbers and lists of them. Collective."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; keys of an older snapshot may be missing."""

    def close(self) -> None:
        """The run ends, whatever the reason."""


class EverySteps(Hook):
    """Calls a function after every so many steps, but not after the last one of an epoch: that has its own end."""

    def __init__(self, every: int, work: Callable[[], object]) -> None:
        self.every, self.work = every, work

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 and not trainer.at_end_of_epoch:
            with trainer.stats.timer.paused():
                self.work()


class FaultInjection(Hook):
    """Ends this rank before a step, as --fail-rank says; not in a run that was resumed."""

    def before_step(self, trainer: Trainer) -> None:
        if not trainer.resumed:
            exit_if_requested(trainer.config.faults, rank=trainer.comm.rank, step=trainer.step + 1)


class StopOnRequest(Hook):
    """Saves a snapshot and ends the run once a rank has received SIGTERM."""

    def after_step(self, trainer: Trainer) -> None:
        if trainer.stopping:
            trainer.save_and_stop()
