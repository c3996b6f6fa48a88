"""--parallel gpipe and 1f1b: one stage of the model on each rank, run by torch.distributed.pipelining.

Every rank reads the whole batch: the first stage uses its inputs, the last its labels, those between only its size.
The two schedules compute the same; gpipe does all forward passes first, 1f1b begins backward passes as soon as it
can and so holds fewer activations. It must not know datasets or snapshots on disk.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call

from train.config import Config
from train.cut import cut
from train.dist import Ranks
from train.errors import UsageError
from train.parallel import HALF, Replicas, Score, States, single_samples_explained


class Stages(Replicas):
    """Rank r holds stage r. A batch passes through the ranks in microbatches; those of the last batch of an epoch are
    fewer or smaller, so that no sample is padded, repeated or dropped."""

    def __init__(self, config: Config, ranks: Ranks, module: nn.Module, shape: Sequence[int]) -> None:
        if config.parallel == "1f1b" and config.microbatches < ranks.world:
            raise UsageError(
                f"--parallel 1f1b needs at least as many microbatches as stages: give --microbatches {ranks.world} "
                f"or more, not {config.microbatches}, or start fewer ranks"
            )
        if ranks.is_main and ranks.world == 1:
            print(f"--parallel {config.parallel} with one rank is one stage: it works, and gains nothing")
        self.first, self.last = ranks.rank == 0, ranks.rank == ranks.world - 1
        super().__init__(config, ranks, module, shape)
        self.data_rank, self.data_world = 0, 1
        self.size = config.batch_size // (config.accumulate * config.microbatches)
        self._schedules: dict[Any, ScheduleGPipe | Schedule1F1B] = {}

    def _place(self, module: nn.Module) -> nn.Module:
        stages = cut(module, parts=self.ranks.world, cuts=self.config.cuts)
        mine = stages[self.ranks.rank]
        self.whole = {name: value.shape for name, value in module.state_dict().items()}
        self.dtype = HALF.get(self.config.amp, next(module.parameters()).dtype)
        self.reads, self.writes = shapes(stages, self.shape)[self.ranks.rank : self.ranks.rank + 2]
        return super()._place(mine)

    def _wrap(self, module: nn.Module) -> nn.Module:
        return _Boundary(self, self._compile(module) if self.config.compile else module)

    def warm(self) -> None:
        """There are no buckets."""

    def train_batch(
        self, chunks: Sequence[tuple[Tensor, Tensor, int]], score: Score, *, global_count: int
    ) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters of this stage.

        Returns [loss sum, right answers, right among five, samples] on the last rank, zeros on the others.
        """
        self._objective = lambda outputs, labels: score(outputs, labels)[0] / global_count
        total = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for inputs, labels, count in chunks:
            for run_inputs, run_labels, pieces in self._runs(inputs[:count], labels[:count]):
                total += self._run(run_inputs, run_labels, pieces, score)
        return total

    def _runs(self, inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """The parts of a batch that one schedule can take, with the number of equal microbatches in each.

        A schedule's microbatches are all of one size. As many pieces as it takes, of sizes that differ by one at
        most, are two parts: those with one sample more, and the others.
        """
        if not len(inputs):
            return
        pieces = -(-len(inputs) // self.size)
        each, larger = divmod(len(inputs), pieces)
        edge = larger * (each + 1)
        if larger:
            yield inputs[:edge], labels[:edge], larger
        yield inputs[edge:], labels[edge:], pieces - larger

    def _run(self, inputs: Tensor, labels: Tensor, pieces: int, score: Score) -> Tensor:
        schedule = self._schedule(inputs, pieces)
        with single_samples_explained():
            outputs = schedule.step(
                *([inputs] if self.first else []), **({"target": labels} if self.last else {})
            )
        return self._sums(score, outputs.detach() if self.last else None, labels)

    def _schedule(self, inputs: Tensor, pieces: int) -> ScheduleGPipe | Schedule1F1B:
        """A schedule for batches of `pieces` microbatches. Its buffers are of fixed size, so there is one for each
        size: that of full batches, and few for the last batch of an epoch."""
        key = pieces, len(inputs), inputs.dtype
        if key in self._schedules:
            return self._schedules[key]
        count = len(inputs) // pieces
        # Shapes that are not given are found by a forward pass on zeros, which older releases do not
        # take back from BatchNorm's running statistics.
        reads = inputs[:count].to("meta") if self.first else self._activations(count, self.reads)
        writes = self._activations(count, self.writes)
        rank, world, device = self.ranks.rank, self.ranks.world, self.ranks.device
        stage = PipelineStage(self.model, rank, world, device, input_args=reads, output_args=writes)
        # With fewer microbatches than stages 1F1B has no order; the two compute the same.
        kind = Schedule1F1B if self.config.parallel == "1f1b" and pieces >= world else ScheduleGPipe
        # The loss is a sum already divided by the global count: the gradients are not to be scaled again.
        made = kind(stage, pieces, loss_fn=self._loss, scale_grads=False)
        return self._schedules.setdefault(key, made)

    def _activations(self, count: int, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(count, *shape, dtype=self.dtype, device="meta", requires_grad=True)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._objective(outputs, labels)

    def _sums(self, score: Score, outputs: Tensor | None, labels: Tensor) -> Tensor:
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        if outputs is not None:
            sums[:3] = score(outputs, labels)
            sums[3] = len(labels)
        return sums

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor, count: int, score: Score) -> Tensor:
        """As `train_batch` returns it, of a batch of the test set. Changes nothing."""
        rank = self.ranks.rank
        outputs, sent = [], []
        # In pieces, so that all stages have work; without a schedule, so that a batch may have any size.
        for piece in inputs[:count].split(-(-count // self.config.microbatches) or 1):
            if not self.first:
                piece = torch.empty(len(piece), *self.reads, dtype=self.dtype, device=self.ranks.device)
                dist.recv(piece, src=rank - 1)
            outputs.append(self.model(piece))
            if not self.last:
                sent.append(dist.isend(outputs[-1], dst=rank + 1))
        for work in sent:
            work.wait()
        return self._sums(score, torch.cat(outputs) if self.last else None, labels[:count])

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, the same on every rank."""
        return self.ranks.sum(super().gradient_norm().square()).sqrt()

    def align_buffers(self) -> None:
        """Each buffer is on one rank only."""

    def state(self, optimizer: torch.optim.Optimizer) -> States:
        """The union of the states of all stages, on every rank, on the CPU."""
        buffer = io.BytesIO()
        torch.save(get_state_dict(self.module, optimizer, options=StateDictOptions(cpu_offload=True)), buffer)
        model: dict[str, Any] = {}
        optim: dict[str, Any] = {"state": {}, "param_groups": []}
        # One after the other: a device that holds one stage need not have room for all at once.
        for rank in range(self.ranks.world):
            blob = self.ranks.share(buffer.getvalue() if rank == self.ranks.rank else None, source=rank)
            part_model, part_optim = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
            model.update(part_model)
            optim["state"].update(part_optim["state"])
            groups = optim["param_groups"] or [
                {**group, "params": []} for group in part_optim["param_groups"]
            ]
            for group, more in zip(groups, part_optim["param_groups"], strict=True):
                group["params"] = group["params"] + more["params"]
            optim["param_groups"] = groups
        return model, optim

    def load(self, optimizer: torch.optim.Optimizer, states: States) -> None:
        """Take over this stage's part of a state. Raises `KeyError` on every rank where it is of another model."""
        model, optim = states
        shapes_there = {name: value.shape for name, value in model.items()}
        if shapes_there != self.whole:
            other = [n for n, shape in {**self.whole, **shapes_there}.items() if self.whole.get(n) != shape]
            raise KeyError(f"it differs in {', '.join([*other, *(self.whole.keys() - shapes_there)])}")
        own = self.module.state_dict().keys()
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in optim["param_groups"]
        ]
        state = {name: value for name, value in optim["state"].items() if name in own}
        part = {name: model[name] for name in own}
        super().load(optimizer, (part, {"state": state, "param_groups": groups}))


class _Boundary(nn.Module):
    """A stage as its neighbours see it: what leaves it has one type and is contiguous, as sending requires."""

    def __init__(self, spread: Stages, layers: nn.Module) -> None:
        super().__init__()
        self.spread = spread
        self.layers = layers

    def forward(self, activations: Tensor) -> Tensor:
        if self.spread.config.channels_last and activations.dim() == 4:
            activations = activations.contiguous(memory_format=torch.channels_last)
        with self.spread.precision():
            outputs = self.layers(activations)
        return outputs.to(self.spread.dtype).contiguous()


def shapes(stages: Sequence[nn.Module], inputs: Sequence[int]) -> list[tuple[int, ...]]:
    """What passes between the stages, without the batch dimension: the inputs of each, then the last outputs.
    Nothing is computed, and the stages stay as they are."""
    passing = [tuple(inputs)]
    for stage in stages:
        shadow = {
            name: torch.empty_like(value, device="meta")
            for name, value in (*stage.named_parameters(), *stage.named_buffers())
        }
        dtype = next(stage.parameters()).dtype
        # Two samples: BatchNorm refuses to train on one.
        outputs = functional_call(stage, shadow, (torch.empty(2, *passing[-1], dtype=dtype, device="meta"),))
        passing.append(tuple(outputs.shape[1:]))
    return passing
