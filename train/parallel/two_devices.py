"""--parallel pipeline: the model on two devices of one process, and replicas of that over the ranks.

Without --split-size one device computes while the other waits (plain model parallelism). With it the batch
passes in chunks, and the first device works on the next chunk while the second works on the last. On the CPU
both devices are the processor: the results are the same, and nothing is gained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from train.distributed.device import move
from train.parallel.ddp import DDPStrategy
from train.parallel.partition import partition
from train.parallel.strategy import Part
from train.task import Batch


class TwoDevices(nn.Sequential):
    """`module`, an `nn.Sequential`, with its first stage on `devices[0]` and its second on `devices[1]`.

    Inputs may be anywhere; outputs are on `devices[1]`. The names in its state are those of `module`, whose
    layers it takes over. A batch passes in as few chunks of at most `split_size` samples as possible, whose
    sizes differ by at most one; 0: in one chunk. Layers that look at the whole batch, such as BatchNorm, see
    one chunk at a time. Raises `UsageError` as `partition` does.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: tuple[torch.device, torch.device],
        *,
        cuts: str = "",
        split_size: int = 0,
        copy_stream: bool = True,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        stages = partition(module, count=2, cuts=cuts)
        for stage, device in zip(stages, devices, strict=True):
            self._modules.update(move(stage, device, channels_last=channels_last)._modules)
        self.stages = tuple(stages)  # in a tuple, so that the layers are not registered a second time
        self.devices = devices
        self.split_size = split_size
        self.copy_stream = CopyStream(*devices) if copy_stream and devices[0].type == "cuda" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for the whole batch, in its order."""
        first, second = self.stages
        count = -(-len(inputs) // self.split_size) if self.split_size else 1
        chunks = inputs.to(self.devices[0], non_blocking=True).tensor_split(count)
        outputs = []
        waiting = self._to_second_device(first(chunks[0]))
        for chunk in chunks[1:]:
            # Launched before the next chunk, so that the second device has work while the first one has.
            outputs.append(second(waiting))
            waiting = self._to_second_device(first(chunk))
        outputs.append(second(waiting))
        return torch.cat(outputs)

    def _to_second_device(self, activations: Tensor) -> Tensor:
        if self.copy_stream is not None:
            return self.copy_stream(activations)
        return activations.to(self.devices[1], non_blocking=True)


class CopyStream:
    """Copies from one GPU to another while both compute.

    A plain copy is queued behind the kernels of both devices' current streams, and what is launched after it
    waits for it. Here it runs on separate streams, one on each device since it waits for the current stream
    of both; events hold back only what needs it. The backward copy runs on the same streams: autograd uses
    those of the forward pass.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self.source_stream, self.target_stream = torch.cuda.Stream(source), torch.cuda.Stream(target)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the target device, ready for its current stream."""
        computed = torch.cuda.current_stream(self.source).record_event()
        self.source_stream.wait_event(computed)
        with torch.cuda.stream(self.source_stream), torch.cuda.stream(self.target_stream):
            copied = tensor.to(self.target, non_blocking=True)
            arrived = self.target_stream.record_event()
        reader = torch.cuda.current_stream(self.target)
        reader.wait_event(arrived)
        # The memory of either may be reused for other tensors only when these streams, too, are done with it.
        tensor.record_stream(self.source_stream)
        copied.record_stream(reader)
        return copied


class TwoDeviceStrategy(DDPStrategy):
    """Every rank holds the whole model on two devices of its own, and takes its share of each batch."""

    def _count_flops(self, module: nn.Module) -> float | None:
        flops = super()._count_flops(module)
        return flops / 2 if flops is not None else None  # per device

    def _place(self, module: nn.Module) -> nn.Module:
        flags = self.config.parallel
        placed = TwoDevices(
            module,
            device_pair(self.comm.device),
            cuts=flags.cuts,
            split_size=flags.split_size,
            copy_stream=flags.copy_stream,
            channels_last=self.config.precision.channels_last,
        )
        if self.config.precision.compile:
            for stage in placed.stages:
                stage.compile()
        return placed

    def _compile(self, module: nn.Module) -> nn.Module:
        return module  # its stages are compiled

    def _device_ids(self) -> list[int] | None:
        return None  # DDP refuses them for a module on more than one device

    def train_batch(self, parts: Sequence[Part], *, global_count: int) -> Tensor:
        """As in the base class. The loss is computed on the second device; the sums are returned on the
        first."""
        return super().train_batch(parts, global_count=global_count).to(self.comm.device)

    def evaluate(self, batch: Batch, count: int) -> Tensor:
        """As in the base class."""
        return super().evaluate(batch, count).to(self.comm.device)


def device_pair(first: torch.device) -> tuple[torch.device, torch.device]:
    """Return the two devices of the process whose first one is `first`: that and the next GPU, or the CPU
    twice."""
    return first, first if first.type == "cpu" else torch.device(first.type, first.index + 1)
