"""The training loop: one `train_step`, one `validate`, and the state that a snapshot holds.

It must not know how the job was started or where its data came from. The same step runs on one process and on
many: the loss of a step is the sum over this rank's samples, times ranks over global count, so that the average
which DDP takes of the gradients is exact for uneven and for empty shards too.
"""

from __future__ import annotations

import math
import os
import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor, nn

from train import snapshot
from train.config import Config
from train.data import Data, batches
from train.dist import Ranks
from train.errors import TrainError, UsageError
from train.metrics import Metrics
from train.sampler import GlobalBatches, Shard

EVAL_BATCH = 256  # samples per rank and forward pass in validation; changes no result


class Trainer:
    """Trains `module` on `data` as `config` says. Every rank calls the same methods in the same order."""

    def __init__(
        self, *, config: Config, ranks: Ranks, module: nn.Module, data: Data, metrics: Metrics
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.data = data
        self.metrics = metrics
        self.module = module.to(ranks.device)
        self.model = ranks.wrap(self.module)
        self.batches = GlobalBatches(
            samples=len(data.train),
            batch_size=config.batch_size,
            seed=config.seed,
            rank=ranks.rank,
            world=ranks.world,
        )
        self.total_steps = config.epochs * self.batches.steps
        self.optimizer = make_optimizer(config, self.module)
        self.scheduler = make_scheduler(config, self.optimizer, self.batches.steps)
        self.step = 0
        self.resumed = False
        self.accuracy = 0.0
        self.best_accuracy = -1.0
        self.best_epoch = 0

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.step // self.batches.steps

    def fit(self) -> None:
        """Train to the last epoch, with a validation and a snapshot after each."""
        if self.step >= self.total_steps:
            self.validate()  # a finished run that is started again still says where it stands
        while self.step < self.total_steps:
            begun = time.perf_counter()
            figures = self.train_epoch()
            seconds = time.perf_counter() - begun
            figures |= self.validate()
            self._report_epoch(figures, seconds)
            self.save()

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the current epoch. Returns the mean loss and accuracy over all ranks."""
        epoch, first = divmod(self.step, self.batches.steps)
        self.model.train()
        since_log = epoch_sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        shards = list(self.batches.epoch(epoch, first))
        pin = self.ranks.device.type == "cuda"
        for inputs, labels, shard in batches(self.data.train, shards, workers=self.config.workers, pin=pin):
            self._rehearse_failure()
            since_log = since_log + self.train_step(inputs, labels, shard)
            self.step += 1
            last = self.step % self.batches.steps == 0
            if last or (self.config.log_every and self.step % self.config.log_every == 0):
                sums = self.ranks.sum(since_log)
                epoch_sums, since_log = epoch_sums + sums, torch.zeros_like(sums)
                self._record_step(sums)
            if not last and self.config.save_every and self.step % self.config.save_every == 0:
                self.save()
        loss, correct, count = epoch_sums.tolist()
        return {"loss": loss / count, "train_accuracy": correct / count, "samples": count}

    def train_step(self, inputs: Tensor, labels: Tensor, shard: Shard) -> Tensor:
        """One update of the weights from this rank's shard of the global batch.

        Returns this rank's [loss sum, correct, count]. Raises `TrainError` before the update if the loss of any
        rank is not finite.
        """
        # Random layers draw by (seed, step, rank) and not by history, so a resumed run draws the same.
        torch.manual_seed(self.config.seed + 7919 * (self.step * self.ranks.world + self.ranks.rank))
        inputs, labels = self._to_device(inputs, labels)
        self.optimizer.zero_grad()
        loss_sum, correct = self._forward(self.model, inputs, labels)
        weight = 1.0 if shard.count else 0.0
        (loss_sum * (weight * self.ranks.world / shard.global_count)).backward()
        self._require_finite(loss_sum)
        self.optimizer.step()
        self.scheduler.step()
        count = torch.full_like(loss_sum, shard.count)
        return torch.stack([loss_sum.detach() * weight, correct * weight, count]).double()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and accuracy on the whole test set: each sample counted once, the same figures on every rank."""
        self.ranks.align_buffers(self.module)
        self.module.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        mine = list(range(self.ranks.rank, len(self.data.test), self.ranks.world))
        parts = [mine[at : at + EVAL_BATCH] for at in range(0, len(mine), EVAL_BATCH)]
        shards = [Shard(indices=part, count=len(part), global_count=len(part)) for part in parts]
        for inputs, labels, shard in batches(self.data.test, shards, workers=self.config.workers, pin=False):
            # The plain module, not the DDP wrapper: ranks may have different numbers of batches here.
            loss_sum, correct = self._forward(self.module, *self._to_device(inputs, labels))
            sums += torch.stack([loss_sum, correct, torch.full_like(loss_sum, shard.count)]).double()
        loss, correct, count = self.ranks.sum(sums).tolist()
        self.accuracy = correct / count
        return {"test_loss": loss / count, "test_accuracy": self.accuracy, "test_samples": count}

    def resume(self) -> None:
        """Continue from the newest snapshot that any rank has. With `--fresh` the old ones are removed first,
        but not when torchrun has restarted the ranks of this very job.

        Raises `UsageError` where that snapshot belongs to a run with other settings.
        """
        if self.config.fresh and not self.ranks.place.restarts:
            self.ranks.in_turn(lambda: snapshot.remove(self.config.folder), what="remove the old snapshots")
        state = snapshot.load_newest(self.config.folder, self.ranks)
        if state is not None:
            self._load_state(state)
            self.metrics.say(f"resumed at step {self.step} (epoch {self.epoch}) from {self.config.folder}")
        elif self.config.resume == "require":
            raise UsageError(f"--resume require: no rank has a valid snapshot in {self.config.folder}")

    def save(self) -> None:
        """Write a snapshot: on rank 0, or with --snapshot-per-node on local rank 0 of every node."""
        self.ranks.align_buffers(self.module)
        place = self.ranks.place
        writes = place.local_rank == 0 if self.config.snapshot_per_node else place.rank == 0
        if writes:
            snapshot.save(self.config.folder, self._state(), writer=place.rank)

    def _forward(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of right answers. The place to change for another kind of task."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.config.amp == "bf16"):
            scores = model(inputs)
            loss_sum = F.cross_entropy(scores, labels, reduction="sum")
        return loss_sum, (scores.argmax(1) == labels).sum().to(loss_sum.dtype)

    def _to_device(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        device = self.ranks.device
        inputs = inputs.to(device, non_blocking=True)
        return self.data.prepare(inputs), labels.to(device, non_blocking=True)

    def _require_finite(self, loss_sum: Tensor) -> None:
        # After the backward pass a bad loss on one rank is in the reduced gradients of all: every rank stops at
        # this step, without another collective operation.
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if math.isfinite(torch.nn.utils.get_total_norm(gradients).item()):
            return
        loss = loss_sum.item()
        where = f"step {self.step + 1}, rank {self.ranks.rank}"
        if math.isfinite(loss):
            raise TrainError(
                f"{where}: the gradients are not finite (this rank's loss is {loss:.4g}); stopped"
            )
        raise TrainError(f"{where}: the loss is {loss}; stopped before the weights changed; try a lower --lr")

    def _rehearse_failure(self) -> None:
        config = self.config
        if self.resumed or self.ranks.rank != config.fail_rank or self.step + 1 != config.fail_step:
            return
        print(
            f"rank {self.ranks.rank} exits with {config.fail_code} on purpose (--fail-rank)", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(config.fail_code)  # no clean-up: a crash is what is rehearsed

    def _state(self) -> snapshot.State:
        return {
            "fingerprint": self.config.fingerprint,
            "step": self.step,
            "epoch": self.epoch,
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def _load_state(self, state: snapshot.State) -> None:
        then, now = state["fingerprint"], self.config.fingerprint
        other = [
            f"{name} {then.get(name)} (now {value})" for name, value in now.items() if then.get(name) != value
        ]
        if other:
            raise UsageError(
                f"the snapshot in {self.config.folder} is of another run: {', '.join(other)}; "
                "give another --out, or --fresh to start again"
            )
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        self.best_accuracy = state["best_accuracy"]
        self.best_epoch = state["best_epoch"]
        self.resumed = True

    def _record_step(self, sums: Tensor) -> None:
        if not self.ranks.is_main:
            return
        loss, correct, count = sums.tolist()
        lr = self.optimizer.param_groups[0]["lr"]
        self.metrics.record("train", step=self.step, loss=loss / count, accuracy=correct / count, lr=lr)

    def _report_epoch(self, figures: dict[str, float], seconds: float) -> None:
        if self.accuracy > self.best_accuracy:
            self.best_accuracy, self.best_epoch = self.accuracy, self.epoch
        rate = figures["samples"] / seconds
        self.metrics.record(
            "epoch", step=self.step, epoch=self.epoch, seconds=seconds, samples_per_second=rate, **figures
        )
        self.metrics.say(
            f"epoch {self.epoch}/{self.config.epochs}  step {self.step}  loss {figures['loss']:.4f}  "
            f"test loss {figures['test_loss']:.4f}  test accuracy {self.accuracy:.4f}  {rate:.0f} samples/s"
        )


def make_optimizer(config: Config, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over the parameters of `module`."""
    parameters = module.parameters()
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    kind = {"adadelta": torch.optim.Adadelta, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(parameters, lr=config.lr, weight_decay=config.weight_decay)


def make_scheduler(
    config: Config, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate as a function of the step."""
    total = config.epochs * steps_per_epoch

    def factor(step: int) -> float:
        if config.scheduler == "step":
            return 0.1 ** (step // (steps_per_epoch * config.lr_epochs))
        if config.scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
