"""The training loop: one `train_step`, one `evaluate`, and the progress that a snapshot holds.

Independent of how the job was started, of the data, of the task, and of how the model is distributed over the
ranks. The same step runs on one process and on many: the loss of a step is a sum over this rank's samples,
and the gradient is that of the mean over the global batch, exact also where ranks have different numbers of
samples, or none. Everything else that a run does is a hook (hooks.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from train import failures, optimizer
from train.checkpoint.full import is_count
from train.checkpoint.snapshots import Progress, Snapshots
from train.config import Config
from train.data.datasets import Datasets
from train.data.readers import open_reader
from train.data.sampler import RankBatch
from train.distributed.communicator import Communicator
from train.distributed.process_group import connection_lost
from train.errors import Preempted, TrainError
from train.hooks import Hook
from train.metrics import throughput
from train.metrics.running_stats import RunningStats
from train.parallel.strategy import Part, Strategy
from train.signals import StopRequest
from train.task import Batch, part, to_device

MIN_LOSS_SCALE = 1e-4  # under fp16; where fairseq gives up, too, 30 skipped steps from torch's initial scale


class Trainer:
    """Trains the model that `strategy` holds on `datasets`. Every rank calls the same methods in the same
    order."""

    def __init__(
        self,
        *,
        config: Config,
        comm: Communicator,
        strategy: Strategy,
        datasets: Datasets,
        hooks: Sequence[Hook] = (),
        stop: StopRequest | None = None,
    ) -> None:
        self.config, self.comm, self.strategy = config, comm, strategy
        self.task, self.datasets = strategy.task, datasets
        self.hooks: list[Hook] = list(hooks)
        self.stop = stop or StopRequest()
        flags = config.optimization
        reader = partial(
            open_reader,
            flags=config.data,
            seed=flags.seed,
            rank=strategy.data_rank,
            world_size=strategy.data_world_size,
            pin=comm.device.type == "cuda",
        )
        self.train_reader = reader(datasets.train, batch_size=flags.batch_size)
        evaluated_together = config.evaluation.eval_batch_size * strategy.data_world_size
        self.test_reader = reader(datasets.test, batch_size=evaluated_together, shuffle=False)
        self.steps_per_epoch = self.train_reader.steps
        self.total_steps = flags.epochs * self.steps_per_epoch
        if flags.max_steps:
            self.total_steps = min(self.total_steps, flags.max_steps)
        self.optimizer = optimizer.make_optimizer(config, strategy.module)
        self.lr = optimizer.make_schedule(config, self.steps_per_epoch, self.total_steps)
        self.snapshots = Snapshots(config, comm, strategy, self.optimizer, samples=self.train_reader.samples)
        self.stats = RunningStats(comm, width=2 * len(self.task.names))
        self.step = 0
        self.evaluated_step = 0  # of the last evaluation that was reported
        self.skipped_steps = 0  # by --amp fp16
        self.stopping = self.resumed = False
        self.result: dict[str, float] = {}  # of the last evaluation

    # -- progress --------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epochs done, the last one perhaps in part."""
        return -(-self.step // self.steps_per_epoch)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the step just done is the last one of its epoch, or of the run."""
        return self.step > 0 and (self.step % self.steps_per_epoch == 0 or self.step >= self.total_steps)

    def status(self) -> dict[str, Any]:
        """Return the progress of the run, for status.json."""
        progress = {
            "step": self.step,
            "steps": self.total_steps,
            "epoch": self.step // self.steps_per_epoch,
            "world_size": self.comm.world_size,
        }
        return {**progress, **{name: value for hook in self.hooks for name, value in hook.status().items()}}

    def figures(self, sums: Tensor, steps: int) -> dict[str, float]:
        """Return the sums over the ranks of some steps as means and rates."""
        means, seconds = self.task.figures(sums[:-2]), sums[-2:].tolist()
        samples = sums[1].item()
        rates = throughput.rates(
            seconds,
            steps=steps,
            samples=samples,
            world_size=self.comm.world_size,
            flops=self.strategy.flops,
            peak=self.strategy.peak_flops,
            device=self.comm.device,
        )
        lr = self.optimizer.param_groups[0]["lr"]
        skipped = {"skipped_steps": self.skipped_steps} if self.strategy.scaler.is_enabled() else {}
        return {**means, "samples": samples, "lr": lr, **skipped, **rates}

    # -- training --------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last epoch, with an evaluation and a snapshot after each.

        Raises `Preempted` on every rank, with a snapshot saved, if one of them received SIGTERM, and
        `TrainError` if another rank has died.
        """
        try:
            if self.comm.any(self.stop.received):
                self.save_and_stop()
            self._fit()
            self.snapshots.finish()
        except RuntimeError as error:
            # No snapshot is saved here. The weights are those of the last step, but the forward pass that
            # failed has changed BatchNorm's statistics, part of FSDP's state was on dead ranks, and NCCL's
            # watchdog usually ends the process before this line: --save-every determines how much is lost.
            self.raise_connection_lost(error)

    def raise_connection_lost(self, error: RuntimeError) -> NoReturn:
        """Raise `TrainError` if `error` means that another rank has died, else `error`."""
        problem = connection_lost(error)
        if problem is None:
            raise error
        advice = self.snapshots.resume_advice
        raise TrainError(f"after step {self.step}: {problem}; the same command {advice}") from error

    def _fit(self) -> None:
        while True:
            if self.at_end_of_epoch and (self.evaluated_step < self.step or self.step >= self.total_steps):
                self._finish_epoch()
            if self.step >= self.total_steps:
                return
            self.train_epoch()

    def _finish_epoch(self) -> None:
        """Evaluate, report and save the epoch that has just ended."""
        figures = self.evaluate()
        if self.evaluated_step < self.step:
            self.evaluated_step = self.step
            for hook in self.hooks:
                hook.after_epoch(self, figures)
            self.save()

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the current epoch. Returns its figures, over all ranks."""
        epoch, first_step = divmod(self.step, self.steps_per_epoch)
        self.strategy.module.train()
        if not first_step:
            self.stats.start_epoch()
        self.stats.timer.restart()
        for hook in self.hooks:
            hook.begin_epoch(self)
        batches = islice(self.train_reader.batches(epoch, first_step), self.total_steps - self.step)
        for batch, counts in self.stats.timer.timed(batches):
            for hook in self.hooks:
                hook.before_step(self)
            self.stats.add_step(self.train_step(batch, counts))
            for hook in self.hooks:
                hook.after_step(self)
        if self.stats.steps:
            self.stats.finish_line()
        return self.figures(self.stats.epoch, self.step - epoch * self.steps_per_epoch)

    def train_step(self, batch: Batch, counts: RankBatch) -> Tensor:
        """Update the weights once, from this rank's samples of the global batch.

        Returns this rank's `Task.sums`. Raises `TrainError` before the update if the loss of any rank is not
        finite.
        """
        # Random layers draw by (seed, step, rank) and not by history, so a resumed run draws the same.
        draw = self.step * self.strategy.data_world_size + self.strategy.data_rank
        self.comm.seed(self.config.optimization.seed + 7919 * draw)
        stop_requests = self.comm.count_async(self.stop.received)
        optimizer.set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad()
        sums = self.strategy.train_batch(self._parts(batch, counts), global_count=counts.global_count)
        self.strategy.scaler.unscale_(self.optimizer)
        norm = self.strategy.gradient_norm()
        # The only place where the host waits for the device.
        norm_value, stops = torch.stack([norm.double(), stop_requests()]).tolist()
        self._update(sums[0], norm, norm_value)
        self.step += 1
        self.stopping = stops > 0
        return sums

    def _update(self, loss: Tensor, norm: Tensor, norm_value: float) -> None:
        """Update the weights, unless the gradients or the loss are not finite."""
        # After the backward pass a bad loss on one rank is in the reduced gradients of all: every rank stops
        # at this step without another collective.
        if not math.isfinite(norm_value):
            if self.config.precision.amp != "fp16" or self.comm.any(not math.isfinite(loss.item())):
                raise failures.not_finite(self.step + 1, loss=loss.item(), kept=self.snapshots.kept)
            self._count_skipped_step()
        if self.config.optimization.clip:
            clip = self.config.optimization.clip
            torch.nn.utils.clip_grads_with_norm_(self.strategy.module.parameters(), clip, norm)
        self.strategy.scaler.step(self.optimizer)
        self.strategy.scaler.update()

    def _count_skipped_step(self) -> None:
        """Count a step that the scaler skips because gradients overflow half precision, and which lowers the
        scale.

        Raises `TrainError` where lowering it has not helped.
        """
        self.skipped_steps += 1
        scale = self.strategy.scaler.get_scale()
        if scale < MIN_LOSS_SCALE:
            raise failures.scale_too_small(self.step + 1, scale=scale, kept=self.snapshots.kept)

    def _parts(self, batch: Batch, counts: RankBatch) -> list[Part]:
        """Return this rank's samples on its device, in --accumulate parts.

        A part without samples repeats one with count 0, because every rank has to take part in every
        reduction.
        """
        batch = self._prepare(batch, counts)
        number_of_parts = self.config.optimization.accumulate
        if number_of_parts == 1:
            return [(batch, counts.count)]
        bounds = [counts.count * number // number_of_parts for number in range(number_of_parts + 1)]
        return [(part(batch, a, max(b, a + 1)), b - a) for a, b in pairwise(bounds)]

    def _prepare(self, batch: Batch, counts: RankBatch) -> Batch:
        """Return the batch as the model gets it, on the device."""
        batch = self.datasets.preprocess(to_device(batch, self.comm.device))
        if self.datasets.augment is not None and self.strategy.module.training:
            batch = self.datasets.augment(
                batch, epoch=self.step // self.steps_per_epoch, indices=counts.indices
            )
        if not self.config.precision.channels_last:
            return batch
        return pytree.tree_map(_channels_last, batch)

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, *, save_on_stop: bool = True) -> dict[str, float]:
        """Return the loss and the metrics on the whole test set, each sample counted once, the same on every
        rank.

        Raises `Preempted` on every rank if one of them received SIGTERM, with a snapshot saved if
        `save_on_stop`.
        """
        self.strategy.sync_buffers()
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.evaluation(self))
            sums = self._evaluate()
            if not self.stopping:
                means = self.task.figures(sums)
                self.result = {
                    **{f"test_{name}": value for name, value in means.items()},
                    "test_samples": sums[1].item(),
                }
                for hook in self.hooks:
                    hook.after_evaluation(self, self.result)
        self.strategy.module.train()
        if self.stopping and not save_on_stop:
            raise Preempted("received SIGTERM: the evaluation was stopped")
        if self.stopping:
            self.save_and_stop()
        return self.result

    @torch.no_grad()
    def _evaluate(self) -> Tensor:
        """Return the sums over all ranks; incomplete ones, and `stopping` set, after SIGTERM."""
        self.strategy.module.eval()
        sums = torch.zeros(2 * len(self.task.names), dtype=torch.float64, device=self.comm.device)
        for batch, counts in self.test_reader.batches():
            stop_requests = self.comm.count_async(self.stop.received)
            sums += self.strategy.evaluate(self._prepare(batch, counts), counts.count)
            self.stopping = bool(stop_requests())
            if self.stopping:
                break
        return self.comm.sum(sums)

    # -- snapshots -------------------------------------------------------------------------------------------

    def resume(self) -> list[str]:
        """Continue from the newest snapshot that any rank has, if there is one. Returns the notes to print.

        Raises `UsageError` if there is none with --resume require, and if it has other settings without
        --force.
        """
        progress, notes = self.snapshots.resume(self._tensors())
        if progress is not None:
            try:
                self._load_progress(progress)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
                raise self.snapshots.invalid(error) from error
            for hook in self.hooks:
                hook.after_resume(self)
            done = self.step >= self.total_steps
            self.snapshots.refuse_changes_of_finished_run(self.step, self.total_steps)
            note = ": training is already complete; --fresh starts again" if done else ""
            epoch = self.step // self.steps_per_epoch
            notes.append(f"resumed at step {self.step} (epoch {epoch}) from {self.config.folder}{note}")
        self.strategy.module.train()
        return notes

    def _load_progress(self, progress: Progress) -> None:
        for name in ("step", "steps_per_epoch", "evaluated", "skipped", "line_steps"):
            if not is_count(progress[name]) or (name == "steps_per_epoch" and not progress[name]):
                raise ValueError(f"{name} is {progress[name]}")
        self.step = progress["step"]
        if progress["steps_per_epoch"] != self.steps_per_epoch:
            # Forced to continue with other batches: restart the epoch that was in progress.
            self.step = progress["step"] // progress["steps_per_epoch"] * self.steps_per_epoch
        self.evaluated_step = min(progress["evaluated"], self.step)
        self.skipped_steps = progress["skipped"]
        self.stats.load(progress)
        for hook in self.hooks:
            if state := progress["hooks"].get(type(hook).__name__):
                hook.load(state)
        self.resumed = True

    def save(self) -> None:
        """Write a snapshot. Raises `TrainError` on every rank if one of them could not."""
        progress = {
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "evaluated": self.evaluated_step,
            "skipped": self.skipped_steps,
            "hooks": self._hook_states(),
            **self.stats.state(),
        }
        self.snapshots.save(progress, self._tensors())

    def _hook_states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for hook in self.hooks:
            name = type(hook).__name__
            if state := hook.state():
                if name in states:
                    raise ValueError(f"a snapshot can keep the state of one {name} only, but there are two")
                states[name] = state
        return states

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for hook in self.hooks for name, value in hook.tensors().items()}

    def save_and_stop(self) -> NoReturn:
        """Save a snapshot and raise `Preempted`."""
        self.save()
        self.snapshots.finish()
        raise Preempted(
            f"received SIGTERM: stopped after step {self.step} with a snapshot in {self.config.folder}; "
            "run the same command to resume"
        )

    def close(self) -> None:
        """End the processes that load data, and what the hooks have open."""
        self.train_reader.close()
        self.test_reader.close()
        for hook in self.hooks:
            hook.close()


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
