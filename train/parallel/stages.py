"""--parallel gpipe and 1f1b: one stage of the model on each rank, run by torch.distributed.pipelining.

Every rank reads the whole batch: the first stage uses its inputs, the last its labels, those between only its
size. The two schedules compute the same; gpipe runs all forward passes first, 1f1b starts backward passes as
soon as it can and so holds fewer activations.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call

from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.parallel.partition import partition
from train.parallel.strategy import AMP_DTYPES, Part, States, Strategy, check_shapes, explained
from train.task import Batch, Task, first, part


class StageStrategy(Strategy):
    """Rank r holds stage r. A batch passes through the ranks in microbatches; those of the last batch of an
    epoch are fewer or smaller, so that no sample is padded, repeated or dropped. The first part of a batch
    goes into the model; the loss and the metrics see the others."""

    def __init__(
        self, config: Config, comm: Communicator, module: nn.Module, task: Task, example: Callable[[], Batch]
    ) -> None:
        flags = config.parallel
        if flags.parallel == "1f1b" and flags.microbatches < comm.world_size:
            raise UsageError(
                f"--parallel 1f1b needs at least as many microbatches as stages: give --microbatches "
                f"{comm.world_size} or more, not {flags.microbatches}, or start fewer ranks"
            )
        self.first, self.last = comm.rank == 0, comm.rank == comm.world_size - 1
        super().__init__(config, comm, module, task, example)
        self.data_rank, self.data_world_size = 0, 1
        self.microbatch_size = config.optimization.batch_size // (
            config.optimization.accumulate * flags.microbatches
        )
        self._schedules: dict[Any, ScheduleGPipe | Schedule1F1B] = {}

    def _place(self, module: nn.Module) -> nn.Module:
        rank = self.comm.rank
        stages = partition(module, count=self.comm.world_size, cuts=self.config.parallel.cuts)
        self.whole_shapes = {name: value.shape for name, value in module.state_dict().items()}
        self.dtype = AMP_DTYPES.get(self.config.precision.amp, next(module.parameters()).dtype)
        inputs = _inputs(self.example())
        self.input_shape, self.output_shape = activation_shapes(stages, inputs)[rank : rank + 2]
        return super()._place(stages[rank])

    def _wrap(self, module: nn.Module) -> nn.Module:
        return _StageModule(self, self._compile(module) if self.config.precision.compile else module)

    def train_batch(self, parts: Sequence[Part], *, global_count: int) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters of this stage.

        Returns `Task.sums` on the last rank, zeros on the others.
        """

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return self.task.sums(outputs, self._batch(targets))[0] / global_count

        self._loss = loss
        total = self._sums(None, None)
        for batch, count in parts:
            for run, microbatches in self._runs(first(batch, count), count):
                total += self._run(run, microbatches)
        return total

    def _batch(self, targets: Tensor) -> Batch:
        """Return a batch as the loss gets it: the inputs are on another rank."""
        return None, targets

    def _runs(self, batch: Batch, count: int) -> Iterator[tuple[Batch, int]]:
        """Yield the parts of a batch that one schedule can take, with the number of equal microbatches in
        each.

        A schedule's microbatches are all of one size. As few microbatches as possible, whose sizes differ by
        at most one, make two parts: those with one sample more, and the others.
        """
        if not count:
            return
        microbatches = -(-count // self.microbatch_size)
        each, larger = divmod(count, microbatches)
        edge = larger * (each + 1)
        if larger:
            yield part(batch, 0, edge), larger
        yield part(batch, edge, count), microbatches - larger

    def _run(self, batch: Batch, microbatches: int) -> Tensor:
        inputs, targets = _inputs(batch), _targets(batch)
        schedule = self._schedule(inputs, microbatches)
        with explained():
            outputs = schedule.step(*([inputs] if self.first else []), target=targets if self.last else None)
        return self._sums(outputs.detach() if self.last else None, targets)

    def _schedule(self, inputs: Tensor, microbatches: int) -> ScheduleGPipe | Schedule1F1B:
        """Return a schedule for these microbatches. Its buffers have a fixed size, so there is one schedule
        for each size: that of full batches, and few for the last batch of an epoch."""
        key = microbatches, len(inputs), inputs.dtype
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(inputs, microbatches)
        return self._schedules[key]

    def _new_schedule(self, inputs: Tensor, microbatches: int) -> ScheduleGPipe | Schedule1F1B:
        size = len(inputs) // microbatches
        rank, world_size, device = self.comm.rank, self.comm.world_size, self.comm.device
        # Shapes that are not given are found by a forward pass on zeros, which older releases do not take
        # back from BatchNorm's running statistics.
        stage_inputs = inputs[:size].to("meta") if self.first else self._activations(size, self.input_shape)
        stage_outputs = self._activations(size, self.output_shape)
        stage = PipelineStage(
            self.model, rank, world_size, device, input_args=stage_inputs, output_args=stage_outputs
        )
        # With fewer microbatches than stages 1F1B has no order; the two compute the same.
        one_f_one_b = self.config.parallel.parallel == "1f1b" and microbatches >= world_size
        # The loss is a sum already divided by the global count: the gradients must not be scaled again.
        options: dict[str, Any] = {"loss_fn": self._compute_loss, "scale_grads": False}
        if one_f_one_b:
            return Schedule1F1B(stage, microbatches, **options)
        return ScheduleGPipe(stage, microbatches, **options)

    def _activations(self, count: int, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(count, *shape, dtype=self.dtype, device="meta", requires_grad=True)

    def _compute_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._loss(outputs, labels)  # schedules outlive the loss of one batch

    def _sums(self, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
        sums = torch.zeros(2 * len(self.task.names), dtype=torch.float64, device=self.comm.device)
        if outputs is not None and targets is not None:
            sums += self.task.sums(outputs, self._batch(targets))
        return sums

    @torch.no_grad()
    def evaluate(self, batch: Batch, count: int) -> Tensor:
        """Return the sums for a batch of the test set, as `train_batch` does. Changes nothing."""
        rank = self.comm.rank
        batch = first(batch, count)
        outputs, sending = [], []
        # In microbatches, so that all stages have work; without a schedule, so that a batch may have any
        # size.
        for piece in _inputs(batch).split(-(-count // self.config.parallel.microbatches) or 1):
            if not self.first:
                piece = torch.empty(len(piece), *self.input_shape, dtype=self.dtype, device=self.comm.device)
                dist.recv(piece, src=rank - 1)
            outputs.append(self.model(piece))
            if not self.last:
                sending.append(dist.isend(outputs[-1], dst=rank + 1))
        for work in sending:
            assert work is not None
            work.wait()
        return self._sums(torch.cat(outputs) if self.last else None, _targets(batch))

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradient of the whole model, the same on every rank."""
        return self.comm.sum(super().gradient_norm().square()).sqrt()

    def sync_buffers(self) -> None:
        """Do nothing: each buffer is on one rank only."""

    def state(self, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> States:
        """Return the union of the states of all stages, on every rank and on the CPU; or this stage's own."""
        if not whole:
            return super().state(optimizer, whole=False)
        own = get_state_dict(self.module, optimizer, options=StateDictOptions(cpu_offload=True))
        model: dict[str, Any] = {}
        optim: dict[str, Any] = {"state": {}, "param_groups": []}
        for stage_model, stage_optim in self._of_all_stages(own):
            model.update(stage_model)
            optim["state"].update(stage_optim["state"])
            groups = optim["param_groups"] or [
                {**group, "params": []} for group in stage_optim["param_groups"]
            ]
            for group, more in zip(groups, stage_optim["param_groups"], strict=True):
                group["params"] = group["params"] + more["params"]
            optim["param_groups"] = groups
        return model, optim

    def load(self, optimizer: torch.optim.Optimizer, states: States, *, whole: bool = True) -> None:
        """Load this stage's part of a state. Raises `KeyError` or `ValueError` on every rank where the state
        is of another model."""
        if not whole:
            super().load(optimizer, states, whole=False)
            return
        model, optim = states
        own_model = self._own_part(model)
        check_shapes(optim["state"], self.whole_shapes)
        own = own_model.keys()
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in optim["param_groups"]
        ]
        state = {name: value for name, value in optim["state"].items() if name in own}
        super().load(optimizer, (own_model, {"state": state, "param_groups": groups}))

    def model_state(self) -> dict[str, Any]:
        """Return the weights and buffers of all stages, on every rank and on the CPU."""
        own = get_model_state_dict(self.module, options=StateDictOptions(cpu_offload=True))
        return {name: value for stage in self._of_all_stages(own) for name, value in stage.items()}

    def load_model(self, state: dict[str, Any]) -> None:
        """Load this stage's part. Raises `KeyError` on every rank where the state is of another model."""
        super().load_model(self._own_part(state))

    def _of_all_stages(self, own: Any) -> Iterator[Any]:
        """Yield what each rank gives as `own`, on the CPU."""
        buffer = io.BytesIO()
        torch.save(own, buffer)
        # One after the other: a device that holds one stage may lack the memory for all of them at once.
        for rank in range(self.comm.world_size):
            blob = self.comm.broadcast_bytes(
                buffer.getvalue() if rank == self.comm.rank else None, source=rank
            )
            yield torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)

    def _own_part(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return this stage's part of the whole model's state. Raises `KeyError` where it is of another
        model."""
        expected, shapes = self.whole_shapes, {name: value.shape for name, value in model.items()}
        if shapes != expected:
            other = sorted(
                name for name in expected.keys() | shapes if expected.get(name) != shapes.get(name)
            )
            more = f" and {len(other) - 3} others" if len(other) > 3 else ""
            raise KeyError(f"it differs in {', '.join(other[:3])}{more}")
        return {name: model[name] for name in self.module.state_dict()}


class _StageModule(nn.Module):
    """A stage as its neighbours see it: its outputs have one dtype and are contiguous, as sending
    requires."""

    def __init__(self, strategy: StageStrategy, layers: nn.Module) -> None:
        super().__init__()
        self.strategy = strategy
        self.layers = layers

    def forward(self, activations: Tensor) -> Tensor:
        if self.strategy.config.precision.channels_last and activations.dim() == 4:
            activations = activations.contiguous(memory_format=torch.channels_last)
        with self.strategy.autocast():
            outputs: Tensor = self.layers(activations)
        return outputs.to(self.strategy.dtype).contiguous()


def _inputs(batch: Batch) -> Tensor:
    """Return what goes into the model. Raises `UsageError` for a batch that a pipeline cannot take."""
    if not (
        isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(one, Tensor) for one in batch)
    ):
        raise UsageError("--parallel gpipe and 1f1b take batches of (inputs, targets) only: use ddp or fsdp")
    inputs: Tensor = batch[0]
    return inputs


def _targets(batch: Batch) -> Tensor:
    targets: Tensor = batch[1]
    return targets


def activation_shapes(stages: Sequence[nn.Module], inputs: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of each stage's inputs and of the last outputs, without the batch dimension.

    `inputs` are two samples, since BatchNorm refuses to train on one. Nothing is computed, and the stages do
    not change.
    """
    activations = inputs.to("meta")
    shapes = [tuple(inputs.shape[1:])]
    for stage in stages:
        meta = {
            name: torch.empty_like(value, device="meta")
            for name, value in (*stage.named_parameters(), *stage.named_buffers())
        }
        if activations.is_floating_point():
            activations = activations.to(next(stage.parameters()).dtype)
        activations = functional_call(stage, meta, (activations,))
        shapes.append(tuple(activations.shape[1:]))
    return shapes
