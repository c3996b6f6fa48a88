"""The lines that a run prints and records: every few steps, after each evaluation and after each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from train.checkpoint.best import BestWeights
from train.config import Config
from train.hooks import Hook, Run
from train.record.output import RunOutput
from train.task import Task

PERCENT = {"accuracy": "Prec@1", "top5": "Prec@5"}  # the names that PyTorch's examples print, in percent


class Report(Hook):
    """Writes to `output`; `best` knows the best evaluation."""

    def __init__(self, config: Config, task: Task, output: RunOutput, best: BestWeights) -> None:
        self.config, self.task, self.output, self.best = config, task, output, best

    def after_step(self, run: Run) -> None:
        if not run.at_end_of_epoch and not (
            self.config.output.log_every and run.step % self.config.output.log_every == 0
        ):
            return
        steps = run.stats.steps
        sums = run.stats.finish_line()
        self.output.record("train", step=run.step, **run.figures(sums, steps))
        self.output.write_status("running", **run.status())
        if self.config.output.print_steps:
            self.output.print_line(self._step_line(run, sums, steps))

    def _step_line(self, run: Run, sums: Tensor, steps: int) -> str:
        epoch, step = divmod(run.step - 1, run.steps_per_epoch)
        world_size = run.comm.world_size
        return step_line(
            place=f"[{epoch + 1}][{step + 1}/{run.steps_per_epoch}]",
            line=averages(self.task, sums, steps * world_size),
            since_epoch_start=averages(self.task, run.stats.epoch, (step + 1) * world_size),
        )

    def after_evaluation(self, run: Run, figures: dict[str, float]) -> None:
        if not run.at_end_of_epoch:
            self.output.record("evaluation", step=run.step, **figures)
            self.output.print_line(f"step {run.step}  {self._test(figures)}")

    def after_epoch(self, run: Run, figures: dict[str, float]) -> None:
        sums = run.stats.epoch
        steps = (run.step - 1) % run.steps_per_epoch + 1
        seconds = sums[-1].item() / run.comm.world_size
        train = run.figures(sums, steps)
        self.output.record("epoch", step=run.step, epoch=run.epoch, seconds=seconds, **train, **figures)
        self.output.write_status("running", **run.status())
        number = train.get("skipped_steps", 0)
        skipped = f"  {number} steps skipped by fp16" if number else ""
        epoch = f"epoch {run.epoch}/{self.config.optimization.epochs}"
        self.output.print_line(
            f"{epoch}  step {run.step}  loss {train['loss']:.4f}  "
            f"{self._test(figures)}  {train['samples_per_second']:.0f} samples/s{skipped}"
        )

    def _test(self, figures: Mapping[str, float]) -> str:
        shown = dict.fromkeys(["loss", self.best.metric, self.task.best])
        return "  ".join(f"test {name} {figures[f'test_{name}']:.4f}" for name in shown)

    def summary(self, figures: Mapping[str, float]) -> str:
        """Return the figures of the last evaluation, for people."""
        name, best = self.best.metric, self.best.best
        digits = 6 if name == "loss" else 4
        text = f"test {name} {figures[f'test_{name}']:.{digits}f}"
        return text if best is None else f"{text} (best {best[0]:.{digits}f} at epoch {best[2]:.0f})"


def averages(task: Task, sums: Tensor, rank_steps: int) -> dict[str, float]:
    """Return the means of sums over all ranks: seconds per step and rank, in total (`time`) and waiting for
    data (`data`), and the loss and metrics of the task. `rank_steps` is the number of steps times that of
    ranks."""
    data_seconds, seconds = sums[-2:].tolist()
    return {"time": seconds / rank_steps, "data": data_seconds / rank_steps, **task.figures(sums[:-2])}


def step_line(*, place: str, line: Mapping[str, float], since_epoch_start: Mapping[str, float]) -> str:
    """Return `Epoch: [e][i/n]` with time, data, loss and metrics, separated by tabs.

    Each value is since the last line, followed in parentheses by the value since the epoch started.
    """
    columns = [f"Epoch: {place}"]
    for name, value in line.items():
        columns.append(_column(name, value, since_epoch_start[name]))
    return "\t".join(columns)


def _column(name: str, value: float, mean: float) -> str:
    if name in PERCENT:
        return f"{PERCENT[name]} {100 * value:.3f} ({100 * mean:.3f})"
    digits = 3 if name in ("time", "data") else 4
    return f"{name.capitalize()} {value:.{digits}f} ({mean:.{digits}f})"


def result(figures: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of the last evaluation, for status.json: test_loss, and the metrics by their own
    names."""
    metrics = {name.removeprefix("test_"): value for name, value in figures.items() if name != "test_samples"}
    return {"test_loss": metrics.pop("loss"), **metrics}
