"""The ways to spread a model over devices and ranks, and what they have in common.

The training loop calls the methods of a strategy without depending on which one it is; the models are not
changed by wrapping. A strategy decides which part of a batch this rank takes, how the gradients become those
of the whole batch, and how the state of the whole model is collected for a snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from train.config import Config
from train.distributed.communicator import Communicator
from train.distributed.device import move
from train.errors import TrainError, UsageError
from train.metrics import throughput
from train.parallel.layers import buffers_preserved, recompute_activations
from train.task import Batch, Task, device_of, first, to_device

Part = tuple[Batch, int]  # a part of this rank's samples, and how many of them count
States = tuple[dict[str, Any], dict[str, Any]]  # of the model and the optimizer, by parameter name

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """The base class: one rank that holds the whole model. `example` returns a batch of two samples on the
    CPU, as the model gets them."""

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        module: nn.Module,
        task: Task,
        example: Callable[[], Batch],
    ) -> None:
        self.config = config
        self.comm = comm
        self.task = task
        self.example = example
        self.peak_flops = config.output.peak_tflops * 1e12 or throughput.peak_flops(comm.device)
        self.flops = self._count_flops(module)
        self.data_rank, self.data_world_size = comm.rank, comm.world_size
        if config.model.activation_checkpointing:
            recompute_activations(module)
        self.module = self._place(module)
        self.model = self._wrap(self.module)
        self.scaler = torch.amp.GradScaler(comm.device.type, enabled=config.precision.amp == "fp16")
        self._trained = [(name, one) for name, one in self.module.named_parameters() if one.requires_grad]

    def _count_flops(self, module: nn.Module) -> float | None:
        """Return FLOPs per sample, or None where the peak of the device is unknown and MFU cannot be
        computed."""
        if self.peak_flops is None:
            return None
        return throughput.training_flops(module, self.task.forward, self.example())

    def _place(self, module: nn.Module) -> nn.Module:
        """Return the module on the device(s) of this rank, ready for the optimizer."""
        if self.config.parallel.sync_bn and self.comm.device.type != "cuda":
            raise UsageError("--sync-bn needs GPUs: PyTorch has no SyncBatchNorm on the CPU")
        if self.config.parallel.sync_bn:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return move(module, self.comm.device, channels_last=self.config.precision.channels_last)

    def _wrap(self, module: nn.Module) -> nn.Module:
        """Return the module through which training batches pass."""
        return module

    def _compile(self, module: nn.Module) -> nn.Module:
        compiled = torch.compile(module)
        assert isinstance(compiled, nn.Module)
        return compiled

    def train_batch(self, parts: Sequence[Part], *, global_count: int) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters.

        Returns this rank's `Task.sums`. `parts` are the parts of this rank's share, of which the first
        `count` samples count. No part is empty, but where none counts BatchNorm's statistics do not change.
        The loss is scaled so that the average over the ranks is the gradient of the mean over the global
        batch, however the samples are distributed.
        """
        total = None
        for number, (batch, count) in enumerate(parts):
            last = number == len(parts) - 1
            with (
                explained(),
                nullcontext() if last else self.no_sync(),
                nullcontext() if count else buffers_preserved(self.module),
            ):
                sums = self._forward(self.model, batch, count)
                self.scaler.scale(sums[0] * (self.data_world_size / global_count)).backward()
            total = sums.detach() if total is None else total + sums.detach()
        assert total is not None
        return total

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does not reduce gradients, for all parts of a batch but the last."""
        return nullcontext()

    def evaluate(self, batch: Batch, count: int) -> Tensor:
        """Return this rank's `Task.sums` for a batch of the test set, of which `count` samples count. Changes
        nothing."""
        # Not through DDP: it would broadcast the buffers at each call.
        return self._forward(self.module, batch, count)

    def _forward(self, model: nn.Module, batch: Batch, count: int) -> Tensor:
        with self.autocast():
            outputs = self.task.forward(model, batch)
        counted = first(to_device(batch, device_of(outputs)), count)
        return self.task.sums(first(outputs, count), counted)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass under --amp."""
        amp = self.config.precision.amp
        half = AMP_DTYPES.get(amp, torch.bfloat16)
        return torch.autocast(self.comm.device.type, half, enabled=amp != "none")

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradient of the whole model, the same on every rank."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self._trained if parameter.grad is not None]

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to every rank."""
        # DDP copies them only at the start of a forward pass: after a step BatchNorm's running statistics
        # differ.
        self.comm.broadcast(self.module.buffers())

    def state(self, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> States:
        """Return the state of the model and its optimizer, by parameter name. Called by every rank.

        With `whole`, the result is complete on the ranks that write snapshots. Otherwise it is this rank's
        part, and its tensors are those in use.
        """
        return get_state_dict(self.module, optimizer, options=self._state_options(whole))

    def load(self, optimizer: torch.optim.Optimizer, states: States, *, whole: bool = True) -> None:
        """Load a whole state that `state` of any strategy and any number of ranks returned, or this rank's
        part.

        Settings of the optimizer that this run's flags determine (--momentum, --weight-decay, --fused) stay.
        Raises `ValueError` where the optimizer is another one, or its state does not have the shapes of the
        parameters.
        """
        model, optim = states
        check_shapes(optim["state"], {name: one.shape for name, one in self.module.named_parameters()})
        groups = []
        for loaded, current in zip(optim["param_groups"], optimizer.param_groups, strict=True):
            if unknown := loaded.keys() - current.keys():
                raise ValueError(f"its optimizer has {', '.join(sorted(unknown))}")
            groups.append({**current, "params": loaded["params"]})
        options = self._state_options(whole)
        set_model_state_dict(self.module, model, options=options)
        # A parameter that no step has used has no state yet, which PyTorch would otherwise refuse, or make
        # up.
        unused = [one for name, one in self.module.named_parameters() if name not in optim["state"]]
        set_optimizer_state_dict(
            self.module,
            optimizer,
            {**optim, "param_groups": groups},
            options=dataclasses.replace(options, strict=not (optim["state"] and unused)),
        )
        for parameter in unused:
            optimizer.state.pop(parameter, None)

    def model_state(self) -> dict[str, Any]:
        """Return the weights and buffers of the whole model on the ranks that write snapshots. Called by
        every rank."""
        return get_model_state_dict(self.module, options=self._state_options(True))

    def load_model(self, state: dict[str, Any]) -> None:
        """Load what `model_state` of any strategy returned. Raises `KeyError`, `RuntimeError` or `ValueError`
        where it is of another model."""
        set_model_state_dict(self.module, state, options=self._state_options(True))

    def _state_options(self, _whole: bool) -> StateDictOptions:
        return StateDictOptions()


def check_shapes(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> None:
    """Raise `ValueError` if a tensor in the state of an optimizer does not have the shape of its parameter:
    PyTorch loads it all the same, and fails in the first step."""
    for name in state.keys() & shapes:
        for key, value in state[name].items():
            if isinstance(value, Tensor) and key != "step" and value.shape != shapes[name]:
                raise ValueError(
                    f"the {key} of {name} has the shape {list(value.shape)}, the parameter "
                    f"{list(shapes[name])}"
                )


@contextmanager
def explained() -> Iterator[None]:
    """Raise `TrainError` instead of errors of PyTorch whose cause is a flag: BatchNorm's refusal to train on
    one sample, and DDP's of a parameter that the last step has not used."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # torch.distributed.pipelining wraps it in a RuntimeError.
        text = f"{error} {error.__cause__}"
        if "Expected to have finished reduction" in text:
            raise TrainError(
                "the loss of the step before did not depend on all parameters: give --find-unused-parameters"
            ) from error
        if "more than 1 value per channel" not in text:
            raise
        raise TrainError(
            "a part of the batch has one sample, and BatchNorm cannot train on one value per channel: use "
            "another --batch-size (the last batch of an epoch counts, too), larger parts (a larger "
            "--split-size, fewer --microbatches or less --accumulate), or a larger --image-size"
        ) from error
