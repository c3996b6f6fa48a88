"""The training loop: one `train_step`, one `validate`, and the state that a snapshot holds.

It must not know how the job was started, where its data came from, or how the model is spread over the ranks. The
same step runs on one process and on many: the score of a step is a sum over this rank's samples, and the gradient
that of the mean over the global batch, exact for uneven and for empty shards too.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from train import dist, failures, optim, scores, speed
from train.augment import Augment
from train.checkpoint import Checkpoints, Progress
from train.config import Config
from train.data import Data
from train.dist import Ranks
from train.errors import Preempted, TrainError, UsageError
from train.loader import Loader
from train.metrics import Metrics, meters, step_line
from train.parallel import Replicas
from train.preempt import StopSignal
from train.sampler import GlobalBatches, Shard, in_order

# Beside the step, what a snapshot holds of a Trainer.
KEPT = ("validated", "logged", "best_accuracy", "best_epoch", "skipped")
EVAL_BATCH = 256  # samples per rank and forward pass in validation; changes no result
LEAST_SCALE = 1e-4  # of the loss under fp16; where fairseq gives up, too, 30 skipped steps from torch's first


class Trainer:
    """Trains the model that `parallel` holds on `data` as `config` says. Every rank calls the same methods in the
    same order."""

    def __init__(
        self,
        *,
        config: Config,
        ranks: Ranks,
        parallel: Replicas,
        data: Data,
        metrics: Metrics,
        stop: StopSignal | None = None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.parallel = parallel
        self.data = data
        self.metrics = metrics
        self.stop = stop or StopSignal()
        self.batches = GlobalBatches(
            samples=len(data.train),
            batch_size=config.batch_size,
            seed=config.seed,
            rank=parallel.data_rank,
            world=parallel.data_world,
        )
        self.total_steps = config.epochs * self.batches.steps
        self.score = scores.regress
        if data.task == "classify":
            self.score = partial(scores.classify, smoothing=config.label_smoothing)
        self.optimizer = optim.make(config, parallel.module.parameters())
        self.checkpoints = Checkpoints(config, ranks, parallel, self.optimizer, samples=len(data.train))
        self.lr = optim.schedule(config, self.batches.steps)
        pin = ranks.device.type == "cuda"
        seed = config.seed + ranks.rank  # what a dataset itself draws must differ between ranks
        settings = {"workers": config.workers, "prefetch": config.prefetch, "pin": pin, "seed": seed}
        self.train_loader = Loader(data.train, **settings)
        self.test_loader = Loader(data.test, **settings)
        augment = Augment(seed=config.seed, pad=data.shape[1] // 8, flip=data.mirrored)
        self.augment = augment if config.augment else None
        self.window = speed.Window()
        self.scored = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # since the last line
        self.epoch_sums = torch.zeros(6, dtype=torch.float64)
        self.carried = torch.zeros(6, dtype=torch.float64)  # of a line begun before the run was interrupted
        self.logged = 0  # the step of the last line
        self.stopping = False
        self.step = 0
        self.validated = 0
        self.skipped = 0  # steps that --amp fp16 left out
        self.resumed = False
        self.accuracy, self.test_loss = 0.0, math.inf
        self.best_accuracy = -1.0
        self.best_epoch = 0
        if config.batch_size < parallel.data_world:
            metrics.say(
                f"--batch-size {config.batch_size} is that of all {parallel.data_world} ranks together: in each step "
                "some of them have nothing to do"
            )

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.step // self.batches.steps

    def fit(self) -> None:
        """Train to the last epoch, with a validation and a snapshot after each.

        Raises `Preempted` on every rank, with a snapshot saved, when one of them was told to stop, and `TrainError`
        where other ranks have gone.
        """
        try:
            if self.ranks.any(self.stop.asked):
                self._leave()
            self._fit()
        except RuntimeError as error:
            # No snapshot is saved here. The weights are those of the last step, but the forward pass that failed has
            # moved BatchNorm's statistics, FSDP's state is on ranks that have gone, and NCCL's watchdog mostly ends
            # the process before this line: --save-every decides how much is lost.
            self.raise_lost(error)

    def raise_lost(self, error: RuntimeError) -> NoReturn:
        """Raises `TrainError` if `error` means that another rank has died, else `error`."""
        problem = dist.lost(error)
        if problem is None:
            raise error
        kept = self.checkpoints.kept
        raise TrainError(f"after step {self.step}: {problem}; the same command {kept}") from error

    def _fit(self) -> None:
        while True:
            ended = self.step % self.batches.steps == 0 and self.epoch > self.validated
            if ended or self.step >= self.total_steps:
                self._finish_epoch()
            if self.step >= self.total_steps:
                return
            self.train_epoch()

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the current epoch. Returns its figures, over all ranks."""
        epoch, first = divmod(self.step, self.batches.steps)
        self.parallel.module.train()
        if not first:
            self.epoch_sums.zero_()
            self.carried.zero_()
            self.logged = self.step
        self.window.restart()
        for batch in self.window.watch(self.train_loader(list(self.batches.epoch(epoch, first)))):
            self._rehearse_failure()
            self.scored += self.train_step(*batch)
            last = self.step % self.batches.steps == 0
            if last or self._due(self.config.log_every):
                self._log()
            if self.stopping:
                self._leave()
            if not last and self._due(self.config.save_every):
                with self.window.paused():
                    self.save()
        return self._figures(self.epoch_sums, self.batches.steps)

    def train_step(self, inputs: Tensor, labels: Tensor, shard: Shard) -> Tensor:
        """One update of the weights from this rank's shard of the global batch.

        Returns this rank's [loss sum, right answers, right among five, samples]. Raises `TrainError` before the update if
        the loss of any rank is not finite.
        """
        # Random layers draw by (seed, step, rank) and not by history, so a resumed run draws the same.
        self.ranks.seed(self.config.seed + 7919 * (self.step * self.ranks.world + self.ranks.rank))
        told_to_stop = self.ranks.any_soon(self.stop.asked)
        optim.set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad()
        scored = self.parallel.train_batch(
            self._chunks(inputs, labels, shard), self.score, global_count=shard.global_count
        )
        self._update(scored[0])
        self.step += 1
        self.stopping = told_to_stop()
        return scored

    def _update(self, loss: Tensor) -> None:
        """Change the weights by the gradients, unless these or the loss are not finite."""
        scaler = self.parallel.scaler
        scaler.unscale_(self.optimizer)
        norm = self.parallel.gradient_norm()
        self._require_finite(loss, norm)
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parallel.module.parameters(), self.config.clip, norm)
        scaler.step(self.optimizer)
        scaler.update()

    def _chunks(self, inputs: Tensor, labels: Tensor, shard: Shard) -> list[tuple[Tensor, Tensor, int]]:
        """This rank's samples on its device, in --accumulate parts; a part beyond the samples repeats one at count 0,
        because every rank has to take part in every reduction."""
        inputs, labels = self._to_device(inputs, labels, shard)
        cuts = [shard.count * part // self.config.accumulate for part in range(self.config.accumulate + 1)]
        return [(inputs[a : max(b, a + 1)], labels[a : max(b, a + 1)], b - a) for a, b in pairwise(cuts)]

    def _to_device(self, inputs: Tensor, labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        device = self.ranks.device
        inputs = self.data.prepare(inputs.to(device, non_blocking=True))
        if self.augment is not None and self.parallel.module.training:
            inputs = self.augment(inputs, epoch=self.epoch, indices=shard.indices)
        if self.config.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, labels.to(device, non_blocking=True)

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        # After the backward pass a bad loss on one rank is in the reduced gradients of all: every rank stops at this
        # step, without another collective operation. Here, and for the wish to stop, the host waits for the device.
        if math.isfinite(norm.item()):
            return
        if self.config.amp == "fp16" and not self.ranks.any(not math.isfinite(loss.item())):
            self._skip()
            return
        raise failures.not_finite(self.step + 1, rank=self.ranks.rank, loss=loss.item())

    def _skip(self) -> None:
        """Count a step that the scaler leaves out, because gradients are too large for half precision. It scales the
        loss less then. Raises `TrainError` where that has not helped."""
        self.skipped += 1
        scale = self.parallel.scaler.get_scale()
        if scale < LEAST_SCALE:
            raise failures.never_finite(self.step + 1, scale=scale)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and accuracy on the whole test set: each sample counted once, the same figures on every rank.

        Raises `Preempted` on every rank when one of them was told to stop.
        """
        self.parallel.align_buffers()
        self.parallel.module.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        rank, world = self.parallel.data_rank, self.parallel.data_world
        shards = in_order(samples=len(self.data.test), batch_size=EVAL_BATCH * world, rank=rank, world=world)
        for inputs, labels, shard in self.test_loader(list(shards)):
            told_to_stop = self.ranks.any_soon(self.stop.asked)
            inputs, labels = self._to_device(inputs, labels, shard)
            sums += self.parallel.evaluate(inputs, labels, shard.count, self.score)
            self.stopping = told_to_stop()
            if self.stopping:
                self._leave()
        loss, top1, top5, count = self.ranks.sum(sums).tolist()
        self.accuracy, self.test_loss = top1 / count, loss / count
        return {
            "test_loss": loss / count,
            "test_accuracy": top1 / count,
            "test_top5": top5 / count,
            "test_samples": count,
        }

    def resume(self) -> None:
        """Continue from the newest snapshot that any rank has, if there is one.

        Raises `UsageError` where there is none although --resume require is given, and where it belongs to a run with
        other settings, unless forced.
        """
        folder = self.config.folder
        progress, other = self.checkpoints.resume()
        if progress is None and self.config.resume == "require":
            raise UsageError(f"--resume require: no rank has a valid snapshot in {folder}")
        if progress is not None:
            self._go_on_from(progress)
            if other:
                self.metrics.say(f"--force: the snapshot in {folder} is of another run: {', '.join(other)}")
            end = ", its last: nothing is left to train; --fresh starts again"
            ended = self.step >= self.total_steps
            self.metrics.say(
                f"resumed at step {self.step} (epoch {self.epoch}) from {folder}{end if ended else ''}"
            )
        self.parallel.module.train()
        self.parallel.warm()

    def _go_on_from(self, progress: Progress) -> None:
        self.step = progress["step"]
        if progress["steps_per_epoch"] != self.batches.steps:
            # Forced to go on with other batches: at the beginning of the epoch that was under way.
            self.step = progress["step"] // progress["steps_per_epoch"] * self.batches.steps
        self.epoch_sums = torch.tensor(progress["epoch_sums"], dtype=torch.float64)
        self.carried = torch.tensor(progress["line_sums"], dtype=torch.float64)
        for name in KEPT:
            setattr(self, name, progress.get(name, getattr(self, name)))  # older ones do not hold all of it
        self.resumed = True

    def save(self) -> None:
        """Write a snapshot. Raises `TrainError` on every rank where one of them could not."""
        sums = {"epoch_sums": self.epoch_sums.tolist(), "line_sums": self._since_line().tolist()}
        numbers = {name: getattr(self, name) for name in KEPT}
        self.checkpoints.save({"step": self.step, "steps_per_epoch": self.batches.steps, **numbers, **sums})

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _log(self) -> None:
        """Reduce what the ranks saw since the last line, and write a line."""
        sums, steps = self._since_line(), self.step - self.logged
        figures = self._figures(sums, steps)
        self.scored.zero_()
        self.carried.zero_()
        self.logged = self.step
        self.window.restart()
        self.epoch_sums += sums
        self.metrics.record("train", step=self.step, **figures)
        self.metrics.status("running", **self.standing())
        if self.config.print_steps:
            self.metrics.say(self._step_line(sums, steps))

    def _step_line(self, sums: Tensor, steps: int) -> str:
        epoch, step = divmod(self.step - 1, self.batches.steps)
        mean = partial(meters, world=self.ranks.world, guesses=self.data.task == "classify")
        return step_line(
            epoch=epoch + 1,
            step=step + 1,
            steps=self.batches.steps,
            now=mean(sums.tolist(), steps=steps),
            mean=mean(self.epoch_sums.tolist(), steps=step + 1),
        )

    def _since_line(self) -> Tensor:
        """[loss sum, right answers, right among five, samples, seconds waited, seconds] since the last line, over all
        ranks, and over the runs before an interruption too."""
        mine = torch.cat([self.scored, self.scored.new_tensor(self.window.sums())])
        return self.ranks.sum(mine).cpu() + self.carried

    def _figures(self, sums: Tensor, steps: int) -> dict[str, float]:
        """The reduced sums of some steps as means, shares and rates."""
        loss, top1, top5, count, *seconds = sums.tolist()
        rates = speed.figures(
            seconds,
            steps=steps,
            samples=count,
            world=self.ranks.world,
            flops=self.parallel.flops,
            peak=self.parallel.peak,
            device=self.ranks.device,
        )
        lr = self.optimizer.param_groups[0]["lr"]
        means = {"loss": loss / count, "accuracy": top1 / count, "top5": top5 / count}
        skipped = {"skipped_steps": self.skipped} if self.parallel.scaler.is_enabled() else {}
        return {**means, "samples": count, "lr": lr, **skipped, **rates}

    def _finish_epoch(self) -> None:
        """Validate, report and save what the epoch that just ended came to."""
        test = self.validate()
        if self.epoch > self.validated:
            self.validated = self.epoch
            if self.accuracy > self.best_accuracy:
                self.best_accuracy, self.best_epoch = self.accuracy, self.epoch
            self._report_epoch(test)
            self.save()

    def _report_epoch(self, test: dict[str, float]) -> None:
        train = self._figures(self.epoch_sums, self.batches.steps)
        seconds = self.epoch_sums[-1].item() / self.ranks.world
        self.metrics.record("epoch", step=self.step, epoch=self.epoch, seconds=seconds, **train, **test)
        self.metrics.status("running", **self.standing())
        skips = f"  {self.skipped} steps skipped by fp16" if self.skipped else ""
        right = f"  test accuracy {self.accuracy:.4f}" if self.data.task == "classify" else ""
        self.metrics.say(
            f"epoch {self.epoch}/{self.config.epochs}  step {self.step}  loss {train['loss']:.4f}  "
            f"test loss {test['test_loss']:.4f}{right}  {train['samples_per_second']:.0f} samples/s{skips}"
        )

    def _leave(self) -> None:
        self.save()
        raise Preempted(
            f"told to stop: stopped after step {self.step} with a snapshot in {self.config.folder}; "
            "the same command goes on from there"
        )

    def close(self) -> None:
        """End the processes that load data."""
        self.train_loader.close()
        self.test_loader.close()

    def result(self) -> dict[str, float]:
        """What the last validation came to, for status.json."""
        found = {"test_loss": self.test_loss}
        return {**found, "accuracy": self.accuracy} if self.data.task == "classify" else found

    def summary(self) -> str:
        """How well the model does, in words."""
        if self.data.task != "classify":
            return f"test loss {self.test_loss:.6f}"
        return f"test accuracy {self.accuracy:.4f} (best {self.best_accuracy:.4f} at epoch {self.best_epoch})"

    def standing(self) -> dict[str, float]:
        """Where the run is, for status.json."""
        best = {"best_accuracy": self.best_accuracy, "best_epoch": self.best_epoch}
        known = self.best_epoch and self.data.task == "classify"
        return {
            "step": self.step,
            "steps": self.total_steps,
            "epoch": self.epoch,
            "world_size": self.ranks.world,
            **(best if known else {}),
        }

    def _rehearse_failure(self) -> None:
        config = self.config
        if self.resumed or self.ranks.rank != config.fail_rank or self.step + 1 != config.fail_step:
            return
        print(
            f"rank {self.ranks.rank} exits with {config.fail_code} on purpose (--fail-rank)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(config.fail_code)  # no clean-up: a crash is what is rehearsed
