"""--parallel pipeline: the model on two devices of one process, and replicas of that over the ranks.

Without --split-size one device computes while the other waits (plain model parallelism). With it the batch passes in
pieces, the first device being busy with the next piece while the second computes on the last. On the CPU both
devices are the processor: the same results, and nothing gained. It must not know datasets or snapshots on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from train.config import Config
from train.cut import cut
from train.dist import Ranks
from train.errors import UsageError
from train.parallel import Replicas, Score


class TwoDevices(nn.Sequential):
    """`module`, an `nn.Sequential`, with its first stage on `devices[0]` and its second on `devices[1]`.

    Inputs may be anywhere; outputs are on `devices[1]`. The names in its state are those of `module`, whose layers
    it takes over. A batch passes in as few pieces of at most `split_size` samples as it takes, of sizes that differ
    by one at most; 0: in one. Layers that look at the whole batch, such as BatchNorm, see one piece at a time.
    Raises `UsageError` as `cut` does.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: tuple[torch.device, torch.device],
        *,
        cuts: str = "",
        split_size: int = 0,
        copy_stream: bool = True,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        super().__init__()
        stages = cut(module, parts=2, cuts=cuts)
        for stage, device in zip(stages, devices, strict=True):
            self._modules.update(stage.to(device, memory_format=memory_format)._modules)
        self.stages = tuple(stages)  # in a tuple, so that the layers are not registered a second time
        self.devices = devices
        self.split_size = split_size
        self.copier = CopyStream(*devices) if copy_stream and devices[0].type == "cuda" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs for the whole batch, in its order."""
        first, second = self.stages
        count = -(-len(inputs) // self.split_size) if self.split_size else 1
        pieces = inputs.to(self.devices[0], non_blocking=True).tensor_split(count)
        outputs = []
        waiting = self._pass_on(first(pieces[0]))
        for piece in pieces[1:]:
            # Launched before the next piece, and so the second device has work while the first has.
            outputs.append(second(waiting))
            waiting = self._pass_on(first(piece))
        outputs.append(second(waiting))
        return torch.cat(outputs)

    def _pass_on(self, activations: Tensor) -> Tensor:
        if self.copier is not None:
            return self.copier(activations)
        return activations.to(self.devices[1], non_blocking=True)


class CopyStream:
    """Copies from one GPU to another while both compute.

    A plain copy is queued behind the kernels of both devices' current streams, and what is launched after it waits
    for it. Here it runs on streams of its own, one on each device since it waits for the current stream of both;
    events hold back only what needs it. The backward copy runs on the same streams: autograd takes those of the
    forward pass.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self.leaving, self.arriving = torch.cuda.Stream(source), torch.cuda.Stream(target)

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` on the target device, ready for its current stream."""
        computed = torch.cuda.current_stream(self.source).record_event()
        self.leaving.wait_event(computed)
        with torch.cuda.stream(self.leaving), torch.cuda.stream(self.arriving):
            copied = tensor.to(self.target, non_blocking=True)
            arrived = self.arriving.record_event()
        reader = torch.cuda.current_stream(self.target)
        reader.wait_event(arrived)
        # The memory of either may be given to other tensors only when these streams, too, are done with it.
        tensor.record_stream(self.leaving)
        copied.record_stream(reader)
        return copied


class TwoDeviceReplicas(Replicas):
    """Every rank holds the whole model on two devices of its own, and takes its share of each batch."""

    def _count_flops(self, module: nn.Module) -> float | None:
        flops = super()._count_flops(module)
        return flops / 2 if flops is not None else None  # what each of the two devices does

    def _place(self, module: nn.Module) -> nn.Module:
        config = self.config
        spread = TwoDevices(
            module,
            devices(self.ranks.device),
            cuts=config.cuts,
            split_size=config.split_size,
            copy_stream=config.copy_stream,
            memory_format=torch.channels_last if config.channels_last else torch.preserve_format,
        )
        if config.compile:
            for stage in spread.stages:
                stage.compile()
        return spread

    def _compile(self, module: nn.Module) -> nn.Module:
        return module

    def _device_ids(self) -> list[int] | None:
        return None  # DDP refuses them for a module on more than one device

    def train_batch(
        self, chunks: Sequence[tuple[Tensor, Tensor, int]], score: Score, *, global_count: int
    ) -> Tensor:
        """As `Replicas.train_batch`. The loss is computed on the second device; the sums come back to the first."""
        return super().train_batch(chunks, score, global_count=global_count).to(self.ranks.device)

    def evaluate(self, inputs: Tensor, labels: Tensor, count: int, score: Score) -> Tensor:
        """As `Replicas.evaluate`."""
        return super().evaluate(inputs, labels, count, score).to(self.ranks.device)


def devices(first: torch.device) -> tuple[torch.device, torch.device]:
    """The two devices of the process whose first one is `first`: that and the GPU after it, or the CPU twice."""
    return first, first if first.type == "cpu" else torch.device(first.type, first.index + 1)


def build(config: Config, ranks: Ranks, module: nn.Module, shape: Sequence[int]) -> Replicas:
    """The module, for inputs of `shape`, on two devices per rank or with one stage per rank, as --parallel says.

    Raises `UsageError` where it cannot be cut so.
    """
    if config.sync_bn:
        raise UsageError(f"--sync-bn works with --parallel ddp only, not {config.parallel}: leave it out")
    if config.parallel == "pipeline":
        return TwoDeviceReplicas(config, ranks, module, shape)
    from train.stages import Stages

    return Stages(config, ranks, module, shape)
