"""The hooks of a run, as the flags say, in the order in which they are called."""

from __future__ import annotations

from dataclasses import dataclass

from train.checkpoint.best import BestWeights
from train.config import Config, profiled_steps
from train.data.datasets import Datasets
from train.distributed.communicator import Communicator
from train.ema import WeightAverage
from train.errors import UsageError
from train.hooks import EvaluateWithinEpoch, EverySteps, FaultInjection, Hook, StopOnRequest
from train.parallel.strategy import Strategy
from train.record.output import RunOutput
from train.record.profile import Profiler
from train.record.report import Report
from train.record.step_reports import StepReports
from train.signals import StopRequest
from train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """A trainer with its hooks, and what writes its lines."""

    trainer: Trainer
    report: Report


def assemble(
    config: Config,
    comm: Communicator,
    strategy: Strategy,
    datasets: Datasets,
    output: RunOutput,
    stop: StopRequest | None = None,
) -> Components:
    """Return the Trainer of a run. Raises `UsageError` for flags that do not fit the task or the data."""
    best = BestWeights(config, strategy.task)
    report = Report(config, strategy.task, output, best)
    hooks: list[Hook] = [FaultInjection()]
    if config.model.ema:
        hooks.append(WeightAverage(strategy.module, config.model.ema))
    if config.output.profile:
        hooks.append(Profiler(config))
    trainer = Trainer(config=config, comm=comm, strategy=strategy, datasets=datasets, stop=stop)
    if config.output.profile and profiled_steps(config).start > trainer.total_steps:
        raise UsageError(f"--profile {config.output.profile}: the run has only {trainer.total_steps} steps")
    hooks += [report, best, StopOnRequest()]
    if config.evaluation.eval_every:
        hooks.append(EvaluateWithinEpoch(config.evaluation.eval_every))
    if config.snapshots.save_every:
        hooks.append(EverySteps(config.snapshots.save_every, trainer.save))
    # Last: a step begins when all that belongs to the one before is done.
    hooks.append(StepReports(strategy.model, comm.device, compiled=config.precision.compile))
    trainer.hooks += hooks
    return Components(trainer=trainer, report=report)
