"""The training loop: one `train_step`, one `validate`, and the progress that a snapshot holds.

Independent of how the job was started, of the source of its data, and of how the model is distributed over the ranks.
The same step runs on one process and on many: the loss of a step is a sum over this rank's samples, and the gradient is
that of the mean over the global batch, exact also for uneven and empty shards.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from train import failures, optim
from train.checkpoint.snapshots import Checkpoints, Progress
from train.config import Config
from train.data.augment import Augment
from train.data.datasets import Datasets, size
from train.data.loader import Loader
from train.data.sampler import GlobalBatchSampler, Shard, sequential_shards
from train.distributed.communicator import Communicator
from train.distributed.process_group import connection_lost
from train.errors import Preempted, TrainError, UsageError
from train.fault_injection import exit_if_requested
from train.loss import classification, regression
from train.parallel.ddp import Chunk, DDPStrategy
from train.record import throughput
from train.record.output import Metrics, average, step_line
from train.record.running_stats import RunningStats
from train.record.step_reports import StepReports
from train.signals import StopRequest

EVAL_BATCH = 256  # samples per rank and forward pass in validation; does not affect the result
MIN_LOSS_SCALE = 1e-4  # under fp16; where fairseq gives up, too, 30 skipped steps from torch's initial scale


class Trainer:
    """Trains the model that `strategy` holds on `datasets`. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        *,
        config: Config,
        comm: Communicator,
        strategy: DDPStrategy,
        datasets: Datasets,
        metrics: Metrics,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.comm = comm
        self.strategy = strategy
        self.datasets = datasets
        self.metrics = metrics
        self.stop = stop or StopRequest()
        self.sampler = GlobalBatchSampler(
            samples=size(datasets.train),
            batch_size=config.batch_size,
            seed=config.seed,
            rank=strategy.data_rank,
            world_size=strategy.data_world_size,
        )
        self.total_steps = config.epochs * self.sampler.steps
        self.classify = datasets.task == "classify"
        self.criterion = (
            partial(classification, smoothing=config.label_smoothing) if self.classify else regression
        )
        self.optimizer = optim.make_optimizer(config, strategy.module.parameters())
        self.checkpoints = Checkpoints(config, comm, strategy, self.optimizer, samples=size(datasets.train))
        self.lr = optim.make_schedule(config, self.sampler.steps)
        loader = partial(
            Loader,
            workers=config.workers,
            prefetch=config.prefetch,
            pin=comm.device.type == "cuda",
            seed=config.seed + comm.rank,  # what a dataset itself draws must differ between ranks
        )
        self.train_loader, self.test_loader = loader(datasets.train), loader(datasets.test)
        augment = Augment(seed=config.seed, pad=datasets.shape[1] // 8, flip=datasets.flip)
        self.augment = augment if config.augment else None
        self.stats = RunningStats(comm)
        self.step_reports = StepReports(strategy.model, comm.device, compiled=config.compile)
        self.last_logged_step = 0
        self.stopping = False
        self.step = 0
        self.validated_epochs = 0
        self.skipped_steps = 0  # by --amp fp16
        self.resumed = False
        self.accuracy, self.test_loss = 0.0, math.inf
        self.best_accuracy = -1.0
        self.best_epoch = 0
        if config.batch_size < strategy.data_world_size:
            metrics.print_line(
                f"--batch-size {config.batch_size} is shared by {strategy.data_world_size} ranks: some ranks are idle "
                "in every step"
            )

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.step // self.sampler.steps

    def fit(self) -> None:
        """Train to the last epoch, with a validation and a snapshot after each.

        Raises `Preempted` on every rank, with a snapshot saved, if one of them received SIGTERM, and `TrainError` if
        another rank has died.
        """
        try:
            if self.comm.any(self.stop.received):
                self._save_and_stop()
            self._fit()
        except RuntimeError as error:
            # No snapshot is saved here. The weights are those of the last step, but the forward pass that failed has
            # changed BatchNorm's statistics, part of FSDP's state was on dead ranks, and NCCL's watchdog usually ends
            # the process before this line: --save-every determines how much is lost.
            self.raise_connection_lost(error)

    def raise_connection_lost(self, error: RuntimeError) -> NoReturn:
        """Raise `TrainError` if `error` means that another rank has died, else `error`."""
        problem = connection_lost(error)
        if problem is None:
            raise error
        advice = self.checkpoints.resume_advice
        raise TrainError(f"after step {self.step}: {problem}; the same command {advice}") from error

    def _fit(self) -> None:
        while True:
            epoch_ended = self.step % self.sampler.steps == 0 and self.epoch > self.validated_epochs
            if epoch_ended or self.step >= self.total_steps:
                self._finish_epoch()
            if self.step >= self.total_steps:
                return
            self.train_epoch()

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the current epoch. Returns its figures, over all ranks."""
        epoch, first_step = divmod(self.step, self.sampler.steps)
        self.strategy.module.train()
        if not first_step:
            self.stats.start_epoch()
            self.last_logged_step = self.step
        timer = self.stats.timer
        timer.restart()
        self.step_reports.begin()
        for batch in timer.timed(self.train_loader(list(self.sampler.shards(epoch, first_step)))):
            if not self.resumed:
                exit_if_requested(self.config, rank=self.comm.rank, step=self.step + 1)
            self.stats.add_step(self.train_step(*batch))
            self.step_reports.finish(self.step)
            last = self.step % self.sampler.steps == 0
            if last or self._is_due(self.config.log_every):
                self._log()
            if self.stopping:
                self._save_and_stop()
            if not last and self._is_due(self.config.save_every):
                with timer.paused():
                    self.save()
            self.step_reports.begin()
        return self._figures(self.stats.epoch, self.sampler.steps)

    def train_step(self, inputs: Tensor, labels: Tensor, shard: Shard) -> Tensor:
        """Update the weights once, from this rank's shard of the global batch.

        Returns this rank's [loss sum, correct, correct in top 5, samples]. Raises `TrainError` before the update if
        the loss of any rank is not finite.
        """
        # Random layers draw by (seed, step, rank) and not by history, so a resumed run draws the same.
        self.comm.seed(self.config.seed + 7919 * (self.step * self.comm.world_size + self.comm.rank))
        stop_requested = self.comm.any_async(self.stop.received)
        optim.set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad()
        sums = self.strategy.train_batch(
            self._chunks(inputs, labels, shard), self.criterion, global_count=shard.global_count
        )
        self._update(sums[0])
        self.step += 1
        self.stopping = stop_requested()
        return sums

    def _update(self, loss: Tensor) -> None:
        """Update the weights, unless the gradients or the loss are not finite."""
        scaler = self.strategy.scaler
        scaler.unscale_(self.optimizer)
        norm = self.strategy.gradient_norm()
        self._check_finite(loss, norm)
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.strategy.module.parameters(), self.config.clip, norm)
        scaler.step(self.optimizer)
        scaler.update()

    def _chunks(self, inputs: Tensor, labels: Tensor, shard: Shard) -> list[Chunk]:
        """Return this rank's samples on its device, in --accumulate parts.

        A part without samples repeats one with count 0, because every rank has to take part in every reduction.
        """
        inputs, labels = self._to_device(inputs, labels, shard)
        parts = self.config.accumulate
        bounds = [shard.count * part // parts for part in range(parts + 1)]
        return [(inputs[a : max(b, a + 1)], labels[a : max(b, a + 1)], b - a) for a, b in pairwise(bounds)]

    def _to_device(self, inputs: Tensor, labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        device = self.comm.device
        inputs = self.datasets.preprocess(inputs.to(device, non_blocking=True))
        if self.augment is not None and self.strategy.module.training:
            inputs = self.augment(inputs, epoch=self.epoch, indices=shard.indices)
        if self.config.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, labels.to(device, non_blocking=True)

    def _check_finite(self, loss: Tensor, norm: Tensor) -> None:
        # After the backward pass a bad loss on one rank is in the reduced gradients of all: every rank stops at this
        # step without another collective. Here, and for stop requests, the host waits for the device.
        if math.isfinite(norm.item()):
            return
        if self.config.amp == "fp16" and not self.comm.any(not math.isfinite(loss.item())):
            self._count_skipped_step()
            return
        raise failures.not_finite(self.step + 1, rank=self.comm.rank, loss=loss.item())

    def _count_skipped_step(self) -> None:
        """Count a step that the scaler skips because gradients overflow half precision, and which lowers the scale.

        Raises `TrainError` where lowering it has not helped.
        """
        self.skipped_steps += 1
        scale = self.strategy.scaler.get_scale()
        if scale < MIN_LOSS_SCALE:
            raise failures.scale_too_small(self.step + 1, scale=scale)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return loss and accuracy on the whole test set, each sample counted once, the same on every rank.

        Raises `Preempted` on every rank if one of them received SIGTERM.
        """
        self.strategy.sync_buffers()
        self.strategy.module.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.comm.device)
        world_size = self.strategy.data_world_size
        shards = sequential_shards(
            samples=size(self.datasets.test),
            batch_size=EVAL_BATCH * world_size,
            rank=self.strategy.data_rank,
            world_size=world_size,
        )
        for inputs, labels, shard in self.test_loader(list(shards)):
            stop_requested = self.comm.any_async(self.stop.received)
            inputs, labels = self._to_device(inputs, labels, shard)
            sums += self.strategy.evaluate(inputs, labels, shard.count, self.criterion)
            self.stopping = stop_requested()
            if self.stopping:
                self._save_and_stop()
        loss, top1, top5, count = self.comm.sum(sums).tolist()
        self.accuracy, self.test_loss = top1 / count, loss / count
        return {
            "test_loss": loss / count,
            "test_accuracy": top1 / count,
            "test_top5": top5 / count,
            "test_samples": count,
        }

    def resume(self) -> None:
        """Continue from the newest snapshot that any rank has, if there is one.

        Raises `UsageError` if there is none with --resume require, and if it has other settings without --force.
        """
        folder = self.config.folder
        progress, differences = self.checkpoints.resume()
        if progress is None and self.config.resume == "require":
            raise UsageError(f"--resume require: no rank has a valid snapshot in {folder}")
        if progress is not None:
            self._load_progress(progress)
            if differences:
                self.metrics.print_line(
                    f"--force: the snapshot in {folder} is from another run: {', '.join(differences)}"
                )
            done = self.step >= self.total_steps
            note = ": training is already complete; --fresh starts again" if done else ""
            self.metrics.print_line(f"resumed at step {self.step} (epoch {self.epoch}) from {folder}{note}")
        self.strategy.module.train()
        self.strategy.warm_up_buckets()

    def _load_progress(self, progress: Progress) -> None:
        self.step = progress["step"]
        if progress["steps_per_epoch"] != self.sampler.steps:
            # Forced to continue with other batches: restart the epoch that was in progress.
            self.step = progress["step"] // progress["steps_per_epoch"] * self.sampler.steps
        self.stats.load(progress)
        # Older snapshots do not hold all of these.
        self.validated_epochs = progress.get("validated", self.validated_epochs)
        self.last_logged_step = progress.get("logged", self.last_logged_step)
        self.best_accuracy = progress.get("best_accuracy", self.best_accuracy)
        self.best_epoch = progress.get("best_epoch", self.best_epoch)
        self.skipped_steps = progress.get("skipped", self.skipped_steps)
        self.resumed = True

    def save(self) -> None:
        """Write a snapshot. Raises `TrainError` on every rank if one of them could not."""
        self.checkpoints.save(
            {
                "step": self.step,
                "steps_per_epoch": self.sampler.steps,
                "validated": self.validated_epochs,
                "logged": self.last_logged_step,
                "best_accuracy": self.best_accuracy,
                "best_epoch": self.best_epoch,
                "skipped": self.skipped_steps,
                **self.stats.state(),
            }
        )

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _log(self) -> None:
        """Reduce the sums of the ranks since the last line, and write a line."""
        steps = self.step - self.last_logged_step
        sums = self.stats.finish_line()
        self.last_logged_step = self.step
        self.metrics.record("train", step=self.step, **self._figures(sums, steps))
        self.metrics.write_status("running", **self.status())
        if self.config.print_steps:
            self.metrics.print_line(self._step_line(sums, steps))

    def _step_line(self, sums: Tensor, steps: int) -> str:
        epoch, step = divmod(self.step - 1, self.sampler.steps)
        averages = partial(average, world_size=self.comm.world_size, classify=self.classify)
        return step_line(
            epoch=epoch + 1,
            step=step + 1,
            steps=self.sampler.steps,
            line=averages(sums.tolist(), steps=steps),
            since_epoch_start=averages(self.stats.epoch.tolist(), steps=step + 1),
        )

    def _figures(self, sums: Tensor, steps: int) -> dict[str, float]:
        """Return the reduced sums of some steps as means, shares and rates."""
        loss, top1, top5, count, *seconds = sums.tolist()
        rates = throughput.rates(
            seconds,
            steps=steps,
            samples=count,
            world_size=self.comm.world_size,
            flops=self.strategy.flops,
            peak=self.strategy.peak_flops,
            device=self.comm.device,
        )
        lr = self.optimizer.param_groups[0]["lr"]
        means = {"loss": loss / count, "accuracy": top1 / count, "top5": top5 / count}
        skipped = {"skipped_steps": self.skipped_steps} if self.strategy.scaler.is_enabled() else {}
        return {**means, "samples": count, "lr": lr, **skipped, **rates}

    def _finish_epoch(self) -> None:
        """Validate, report and save the epoch that has just ended."""
        test = self.validate()
        if self.epoch > self.validated_epochs:
            self.validated_epochs = self.epoch
            if self.accuracy > self.best_accuracy:
                self.best_accuracy, self.best_epoch = self.accuracy, self.epoch
            self._report_epoch(test)
            self.save()

    def _report_epoch(self, test: dict[str, float]) -> None:
        sums = self.stats.epoch
        train = self._figures(sums, self.sampler.steps)
        seconds = sums[-1].item() / self.comm.world_size
        self.metrics.record("epoch", step=self.step, epoch=self.epoch, seconds=seconds, **train, **test)
        self.metrics.write_status("running", **self.status())
        skipped = f"  {self.skipped_steps} steps skipped by fp16" if self.skipped_steps else ""
        accuracy = f"  test accuracy {self.accuracy:.4f}" if self.classify else ""
        self.metrics.print_line(
            f"epoch {self.epoch}/{self.config.epochs}  step {self.step}  loss {train['loss']:.4f}  "
            f"test loss {test['test_loss']:.4f}{accuracy}  {train['samples_per_second']:.0f} samples/s{skipped}"
        )

    def _save_and_stop(self) -> NoReturn:
        self.save()
        raise Preempted(
            f"received SIGTERM: stopped after step {self.step} with a snapshot in {self.config.folder}; "
            "run the same command to resume"
        )

    def close(self) -> None:
        """End the processes that load data."""
        self.train_loader.close()
        self.test_loader.close()

    def result(self) -> dict[str, float]:
        """Return the figures of the last validation, for status.json."""
        figures = {"test_loss": self.test_loss}
        return {**figures, "accuracy": self.accuracy} if self.classify else figures

    def summary(self) -> str:
        """Return the figures of the last validation, for people."""
        if not self.classify:
            return f"test loss {self.test_loss:.6f}"
        return f"test accuracy {self.accuracy:.4f} (best {self.best_accuracy:.4f} at epoch {self.best_epoch})"

    def status(self) -> dict[str, float]:
        """Return the progress of the run, for status.json."""
        best = {"best_accuracy": self.best_accuracy, "best_epoch": self.best_epoch}
        return {
            "step": self.step,
            "steps": self.total_steps,
            "epoch": self.epoch,
            "world_size": self.comm.world_size,
            **(best if self.best_epoch and self.classify else {}),
        }
