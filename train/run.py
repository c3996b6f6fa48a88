"""Runs one rank of a training job: joins the process group, loads the data, builds the model and trains it.

Every failure ends here as an exit code, and as one sentence wherever a user can fix its cause.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from train import models, pretrained
from train.checkpoint.best import NAME as BEST
from train.checkpoint.best import read_best, weights_of
from train.components import Components, assemble
from train.config import Config
from train.data.datasets import Datasets, load, move_to_device
from train.distributed import device
from train.distributed.communicator import Communicator
from train.distributed.process_group import join, raise_connection_lost
from train.distributed.rank_info import find_rank
from train.errors import Preempted, TrainError, UsageError, time_of
from train.failures import describe_failure
from train.parallel import select
from train.parallel.strategy import Strategy
from train.process_exit import exit_process, keep_until_exit
from train.record.loggers import open_loggers
from train.record.output import RunOutput, make_output_folder, print_line
from train.record.report import result
from train.signals import StopRequest, handle_stop_signals


def load_named(config: Config, *, download: bool) -> Datasets:
    """Return the datasets that --dataset names."""
    return load(config, download=download)


def build_named(config: Config, datasets: Datasets) -> nn.Module:
    """Return the model that --model names."""
    seed = config.optimization.seed
    return models.build(config.model.model, shape=datasets.shape, classes=datasets.classes, seed=seed)


@dataclass(frozen=True, slots=True)
class Builders:
    """What is trained, and on what: two functions at the top of a module, since --spawn sends them to other
    processes."""

    load: Callable[..., Datasets] = load_named
    build: Callable[[Config, Datasets], nn.Module] = build_named

    def check(self) -> None:
        """Raise `UsageError` for functions that cannot be called as they are going to be."""
        for name, function, call in (
            ("load(config, *, download)", self.load, ((None,), {"download": False})),
            ("build(config, datasets)", self.build, ((None, None), {})),
        ):
            try:
                inspect.signature(function).bind(*call[0], **call[1])
            except TypeError as error:
                raise UsageError(f"start() needs a function {name}: {error}") from None


def run_rank(config: Config, started: float, builders: Builders | None = None) -> int:
    """Train as one rank of the job. `started` is when the process began, on time.perf_counter's clock.

    Returns the exit code.
    """
    return run_and_report(config, partial(join_and_train, config, started, builders or Builders()))


def run_and_report(config: Config, work: Callable[[], object]) -> int:
    """Run `work` and print why it failed, if it did. Returns the exit code of the rank."""
    handler = get_error_handler()
    handler.initialize()
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:
        keep_until_exit(error)  # its traceback references the model
        failure = describe_failure(error, config)
        if failure is None:
            handler.record_exception(error)  # torchrun shows its traceback as the cause of the failed job
            sys.excepthook(*sys.exc_info())
            return 1
        failure.record(time_of(error))
        rank = str(config.position[0]) if config.position else os.environ.get("RANK", "0")
        if rank == "0" or not failure.same_on_all_ranks:
            print(f"train: rank {rank}: {failure.message}\n", end="", file=sys.stderr, flush=True)
        return failure.exit_code
    return 0


def join_and_train(config: Config, started: float, builders: Builders) -> None:
    """Join the process group and train with the other ranks."""
    info = find_rank(config, os.environ)
    on_lost = partial(report_and_exit, config, raise_connection_lost)
    # Signals are handled only once all ranks have joined: before that there is nothing to save, and a process
    # that waits for the others in C++ would not notice the request.
    with join(config, info, on_lost=on_lost) as comm, handle_stop_signals() as stop:
        if comm.world_size > 1:  # the only line that every rank prints
            print_line(f"rank {comm.rank} of {comm.world_size} joined on {comm.device}")
        train(config, comm, stop, started, builders)


def train(config: Config, comm: Communicator, stop: StopRequest, started: float, builders: Builders) -> None:
    """Load the data, build the model, train it or only evaluate it, and print the result."""
    device.set_numerics(config)
    if comm.device.type == "cpu":
        device.keep_freed_memory()
    datasets = load_datasets(config, comm, builders)
    comm.seed(config.optimization.seed)  # every rank has to begin with the same weights
    module = builders.build(config, datasets)
    if not isinstance(module, nn.Module):
        raise UsageError(f"`build` must return a model, an nn.Module, not {type(module).__name__}")
    notes = pretrained.prepare(config, module)
    strategy = select.build(config, comm, module, datasets.task, datasets.example)
    keep_until_exit(strategy)
    output = RunOutput(config.folder, enabled=comm.is_main, loggers=partial(open_loggers, config))
    for note in notes:
        output.print_line(note)
    components = assemble(config, comm, strategy, datasets, output, stop)
    if config.evaluation.evaluate:
        evaluate(config, comm, strategy, components, output)
        return
    comm.run_together(output.lock, what="use the folder of --out")
    trainer = components.trainer
    if config.optimization.batch_size < strategy.data_world_size:
        output.print_line(
            f"--batch-size {config.optimization.batch_size} is shared by {strategy.data_world_size} ranks: "
            "some ranks are idle in every step"
        )
    for note in trainer.resume():
        output.print_line(note)
    comm.run_together(
        partial(output.open, trainer.step, evaluated=trainer.evaluated_step), what="open the output files"
    )
    output.write_status("running", **trainer.status())
    fit(config, comm, components, output)
    output.write_status("finished", **trainer.status(), **result(trainer.result))
    output.print_line(
        f"{components.report.summary(trainer.result)} after {trainer.epoch} "
        f"epoch{'s' * (trainer.epoch != 1)}, "
        f"{time.perf_counter() - started:.1f} s"
    )


def evaluate(
    config: Config, comm: Communicator, strategy: Strategy, components: Components, output: RunOutput
) -> None:
    """--evaluate: print the figures of the weights that --weights names, or of the best ones in --out."""
    where = config.model.weights
    if not where:
        best = read_best(config.folder, comm)
        weights = weights_of(best)
        if best is None or weights is None:
            raise UsageError(
                f"--evaluate: no rank has a valid {config.folder / BEST}; give --weights FILE, or another "
                "--out"
            )
        pretrained.load_exactly(strategy, weights, config.folder / BEST)
        where = f"{config.folder / BEST}, step {best['step']}"
    # Nothing of the run in the folder changes.
    components.trainer.hooks.clear()
    try:
        figures = components.trainer.evaluate(save_on_stop=False)
    finally:
        components.trainer.close()
    shown = "  ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in figures.items())
    output.print_line(f"{shown}  ({where})")


def load_datasets(config: Config, comm: Communicator, builders: Builders) -> Datasets:
    """Load the datasets, local rank 0 of each node first, and make the output folder."""

    def load_here() -> Datasets:
        loaded = builders.load(config, download=config.data.download and comm.local_rank == 0)
        if not isinstance(loaded, Datasets):
            raise UsageError(
                f"`load` must return Datasets(train=..., test=..., task=...), not {type(loaded).__name__}"
            )
        make_output_folder(config.folder)
        return loaded

    datasets = comm.local_rank_0_first(load_here, what="load the data")
    return move_to_device(datasets, comm.device) if config.data.on_device else datasets


def fit(config: Config, comm: Communicator, components: Components, output: RunOutput) -> None:
    """Run the training loop, and record in status.json how it ended if it did not finish."""
    trainer = components.trainer

    def on_lost(error: RuntimeError) -> None:
        try:
            trainer.raise_connection_lost(error)
        except TrainError as problem:
            with suppress(OSError):
                output.write_status("failed", **trainer.status(), error=str(problem))
            raise

    exit_code = TrainError.exit_code
    try:
        with comm.monitor.handler(partial(report_and_exit, config, on_lost)):
            trainer.fit()
        exit_code = 0
    except Preempted as stop:
        exit_code = stop.exit_code
        output.write_status("preempted", **trainer.status())
        raise
    except BaseException as error:
        with suppress(OSError):  # the disk may be what failed
            output.write_status("failed", **trainer.status(), error=str(error) or type(error).__name__)
        raise
    finally:
        trainer.close()
        output.close(exit_code)


def report_and_exit(
    config: Config, raise_cause: Callable[[RuntimeError], object], error: RuntimeError
) -> NoReturn:
    """End the process because another rank has died. Called from a thread beside the main one.

    The main thread waits in C++, where no exception reaches it. `raise_cause` raises what the main thread
    would have.
    """
    exit_process(run_and_report(config, partial(raise_cause, error)))
