"""--parallel ddp: every rank holds the whole model. Also the base class of the other ways to spread a model.

The training loop calls the methods of a strategy without depending on which one it is; the models are not changed by
wrapping. A strategy decides which part of a batch this rank takes, how the gradients become those of the whole
batch, and how the state of the whole model is collected for a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.distributed.communicator import Communicator
from train.distributed.device import move
from train.errors import TrainError, UsageError
from train.record import throughput

Chunk = tuple[Batch, int]  # a part of this rank's samples, and how many of them count
States = tuple[dict[str, Any], dict[str, Any]]  # of the model and the optimizer, by parameter name

HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DDPStrategy:
    """Every rank holds the whole model and takes its share of each batch."""

    def __init__(
        self, config: Config, comm: Communicator, module: nn.Module, task: Task, example: Batch
    ) -> None:
        self.config = config
        self.comm = comm
        self.task = task
        self.example = example
        self.peak_flops = config.output.peak_tflops * 1e12 or throughput.peak_flops(comm.device)
        self.flops = self._count_flops(module)
        self.data_rank, self.data_world_size = comm.rank, comm.world_size
        self.module = self._place(module)
        self.model = self._wrap(self.module)
        self.scaler = torch.amp.GradScaler(comm.device.type, enabled=config.amp == "fp16")

    def _count_flops(self, module: nn.Module) -> float | None:
        """Return FLOPs per sample, or None where the peak of the device is unknown and MFU cannot be computed."""
        if self.peak_flops is None:
            return None
        return throughput.training_flops(module, self.task, self.example)

    def _place(self, module: nn.Module) -> nn.Module:
        """Return the module on the device(s) of this rank, ready for the optimizer."""
        if self.config.sync_bn and self.comm.device.type != "cuda":
            raise UsageError("--sync-bn needs GPUs: PyTorch has no SyncBatchNorm on the CPU")
        if self.config.sync_bn:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return move(module, self.comm.device, channels_last=self.config.channels_last)

    def _wrap(self, module: nn.Module) -> nn.Module:
        """Return the module with its gradients averaged over all ranks after each backward pass."""
        if self.config.compile:
            module = self._compile(module)
        if not self.comm.info.distributed:
            return module
        return DistributedDataParallel(
            module,
            device_ids=self._device_ids(),
            bucket_cap_mb=self.config.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.config.static_graph,
        )

    def _compile(self, module: nn.Module) -> nn.Module:
        compiled = torch.compile(module)
        assert isinstance(compiled, nn.Module)
        return compiled

    def _device_ids(self) -> list[int] | None:
        device = self.comm.device
        return [device.index] if device.type == "cuda" else None

    def warm_up_buckets(self) -> None:
        """Bring DDP's gradient buckets into their final order, which they otherwise take after the first step.

        The order of additions follows the buckets. A resumed run would add in the first order where the
        uninterrupted one added in the second; with three ranks or more the sums then differ in their last bits.
        """
        if self.comm.world_size < 3 or self.model is self.module:
            return
        weight = next(self.module.parameters())
        share = -(-self.config.batch_size // (self.data_world_size * self.config.accumulate))
        with self.buffers_preserved():
            for _ in range(2):
                zeros = weight.new_zeros((share, *self.shape))
                with explain_single_sample_batchnorm(), self.autocast():
                    (self.model(zeros).sum() * 0).backward()

    @contextmanager
    def buffers_preserved(self) -> Iterator[None]:
        """Restore the buffers, such as BatchNorm's running statistics, at the end of the block."""
        before = [buffer.clone() for buffer in self.module.buffers()]
        yield
        for buffer, value in zip(self.module.buffers(), before, strict=True):
            buffer.copy_(value)

    def train_batch(self, chunks: Sequence[Chunk], criterion: Criterion, *, global_count: int) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters.

        Returns this rank's [loss sum, correct, correct in top 5, samples]. `chunks` are (inputs, labels, count): the
        parts of this rank's share, of which the first `count` samples count. No chunk is empty, but where none counts
        BatchNorm's statistics do not change. The loss is scaled so that the average over the ranks is the gradient of
        the mean over the global batch, however the samples are distributed.
        """
        total = None
        for number, (inputs, labels, count) in enumerate(chunks):
            last = number == len(chunks) - 1
            with (
                explain_single_sample_batchnorm(),
                nullcontext() if last else self.no_sync(),
                nullcontext() if count else self.buffers_preserved(),
            ):
                sums = self._forward(self.model, inputs, labels, count, criterion)
                self.scaler.scale(sums[0] * (self.data_world_size / global_count)).backward()
            total = sums.detach() if total is None else total + sums.detach()
        assert total is not None
        return total

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does not reduce gradients, for all chunks of a batch but the last."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def evaluate(self, inputs: Tensor, labels: Tensor, count: int, criterion: Criterion) -> Tensor:
        """Return this rank's sums for a batch of the test set, as `train_batch` does. Changes nothing."""
        # Not through DDP: it would broadcast the buffers at each call.
        return self._forward(self.module, inputs, labels, count, criterion)

    def _forward(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, count: int, criterion: Criterion
    ) -> Tensor:
        with self.autocast():
            outputs: Tensor = model(inputs)[:count]
        sums = criterion(outputs, labels[:count].to(outputs.device))
        return torch.cat([sums, sums.new_tensor([count])])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass under --amp."""
        half = HALF_PRECISION.get(self.config.amp, torch.bfloat16)
        return torch.autocast(self.comm.device.type, half, enabled=self.config.amp != "none")

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradient of the whole model, the same on every rank."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to every rank."""
        self.comm.broadcast_buffers(self.module)

    def state(self, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> States:
        """Return the state of the model and its optimizer, by parameter name. Called by every rank.

        With `whole`, the result is complete on the ranks that write snapshots. Otherwise it is this rank's part, and
        its tensors are those in use.
        """
        return get_state_dict(self.module, optimizer, options=self._state_options(whole))

    def load(self, optimizer: torch.optim.Optimizer, states: States, *, whole: bool = True) -> None:
        """Load a whole state that `state` of any strategy and any number of ranks returned, or this rank's part.

        Settings of the optimizer that this run's flags determine (--momentum, --weight-decay, --fused) stay. Raises
        `ValueError` where the optimizer is another one.
        """
        model, optim = states
        groups = []
        for loaded, current in zip(optim["param_groups"], optimizer.param_groups, strict=True):
            if unknown := loaded.keys() - current.keys():
                raise ValueError(f"its optimizer has {', '.join(sorted(unknown))}")
            groups.append({**current, "params": loaded["params"]})
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=model,
            optim_state_dict={**optim, "param_groups": groups},
            options=self._state_options(whole),
        )

    def _state_options(self, _whole: bool) -> StateDictOptions:
        return StateDictOptions()


@contextmanager
def explain_single_sample_batchnorm() -> Iterator[None]:
    """Raise `TrainError` instead of BatchNorm's refusal to train on one sample."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # torch.distributed.pipelining wraps it in a RuntimeError.
        if "more than 1 value per channel" not in f"{error} {error.__cause__}":
            raise
        raise TrainError(
            "a part of the batch has one sample, and BatchNorm cannot train on one value per channel: use another "
            "--batch-size (the last batch of an epoch counts, too), larger parts (a larger --split-size, fewer "
            "--microbatches or less --accumulate), or a larger --image-size"
        ) from error
