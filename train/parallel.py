"""How one model is spread over the ranks: each mode of --parallel is one class with the same few methods.

The training loop calls them and does not know which one it has; the models do not know that they are wrapped. What
a mode decides: which part of a batch this rank takes, how the gradients become those of the whole batch, and how
the state of the whole model is collected for a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from train import speed
from train.config import Config
from train.dist import Ranks
from train.errors import TrainError, UsageError

Score = Callable[[Tensor, Tensor], Tensor]
States = tuple[dict[str, Any], dict[str, Any]]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Replicas:
    """--parallel ddp: every rank holds the whole model, and takes its share of each batch."""

    def __init__(self, config: Config, ranks: Ranks, module: nn.Module, shape: Sequence[int]) -> None:
        self.config = config
        self.ranks = ranks
        self.shape = tuple(shape)
        self.peak = config.peak_tflops * 1e12 or speed.peak_flops(ranks.device)
        self.flops = self._count_flops(module)
        self.data_rank, self.data_world = ranks.rank, ranks.world
        self.module = self._place(module)
        self.model = self._wrap(self.module)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.amp == "fp16")

    def _count_flops(self, module: nn.Module) -> float | None:
        """FLOPs per sample, where the peak of the device is known, so that they say something."""
        if self.peak is None:
            return None
        dtype = next(module.parameters()).dtype
        return speed.training_flops(module, torch.empty(1, *self.shape, device="meta", dtype=dtype))

    def _place(self, module: nn.Module) -> nn.Module:
        """The module on the device(s) of this rank, ready for the optimizer."""
        if self.config.sync_bn and self.ranks.device.type != "cuda":
            raise UsageError("--sync-bn needs GPUs: PyTorch has no SyncBatchNorm on the CPU")
        if self.config.sync_bn:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        layout = torch.channels_last if self.config.channels_last else torch.preserve_format
        return module.to(self.ranks.device, memory_format=layout)

    def _wrap(self, module: nn.Module) -> nn.Module:
        """The module with its gradients averaged over all ranks after each backward pass."""
        if self.config.compile:
            module = self._compile(module)
        if not self.ranks.place.grouped:
            return module
        return DistributedDataParallel(
            module,
            device_ids=self._device_ids(),
            bucket_cap_mb=self.config.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.config.static_graph,
        )

    def _compile(self, module: nn.Module) -> nn.Module:
        return torch.compile(module)

    def _device_ids(self) -> list[int] | None:
        device = self.ranks.device
        return [device.index] if device.type == "cuda" else None

    def warm(self) -> None:
        """Bring DDP's gradient buckets into their final order, which they otherwise take after the first step.

        The order of additions follows the buckets. A resumed run would add in the first order where the
        uninterrupted one added in the second; with three ranks or more the sums then differ in their last bits.
        """
        if self.ranks.world < 3 or self.model is self.module:
            return
        weight = next(self.module.parameters())
        share = -(-self.config.batch_size // (self.data_world * self.config.accumulate))
        with self.buffers_kept():
            for _ in range(2):
                zeros = weight.new_zeros((share, *self.shape))
                with single_samples_explained(), self.precision():
                    (self.model(zeros).sum() * 0).backward()

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Leave the buffers, such as BatchNorm's running statistics, at the end as they are now."""
        before = [buffer.clone() for buffer in self.module.buffers()]
        yield
        for buffer, then in zip(self.module.buffers(), before, strict=True):
            buffer.copy_(then)

    def train_batch(
        self, chunks: Sequence[tuple[Tensor, Tensor, int]], score: Score, *, global_count: int
    ) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters.

        Returns what this rank saw: [loss sum, right answers, right among five, samples].
        `chunks` are (inputs, labels, count): the parts of this rank's share, of which the first `count` samples
        count; no part is without samples, but where none counts BatchNorm's statistics do not move. The scale makes
        the average over the ranks the gradient of the mean over the global batch, however the samples are dealt.
        """
        total = None
        for number, (inputs, labels, count) in enumerate(chunks):
            last = number == len(chunks) - 1
            with (
                single_samples_explained(),
                self.no_sync() if not last else nullcontext(),
                self.buffers_kept() if not count else nullcontext(),
            ):
                scored = self._score(self.model, inputs, labels, count, score)
                self.scaler.scale(scored[0] * (self.data_world / global_count)).backward()
            total = scored.detach() if total is None else total + scored.detach()
        assert total is not None
        return total

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients to this rank, for all parts of a batch but the last."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def evaluate(self, inputs: Tensor, labels: Tensor, count: int, score: Score) -> Tensor:
        """What this rank saw of a batch of the test set, as `train_batch` returns it. Changes nothing."""
        # Not through DDP: it would broadcast the buffers at each call.
        return self._score(self.module, inputs, labels, count, score)

    def _score(self, model: nn.Module, inputs: Tensor, labels: Tensor, count: int, score: Score) -> Tensor:
        with self.precision():
            scores = model(inputs)[:count]
        scored = score(scores, labels[:count].to(scores.device))
        return torch.cat([scored, scored.new_tensor([count])])

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass under --amp."""
        half = HALF.get(self.config.amp, torch.bfloat16)
        return torch.autocast(self.ranks.device.type, half, enabled=self.config.amp != "none")

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of the whole model, the same on every rank."""
        return torch.nn.utils.get_total_norm(self.gradients())

    def align_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""
        self.ranks.align_buffers(self.module)

    def state(self, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> States:
        """The state of the model and of its optimizer, by parameter names. Every rank calls it.

        The whole state counts on those ranks that write snapshots. Otherwise it is this rank's part, whose tensors
        are those in use.
        """
        return get_state_dict(self.module, optimizer, options=self._options(whole))

    def load(self, optimizer: torch.optim.Optimizer, states: States, *, whole: bool = True) -> None:
        """Take over a whole state that `state` of any mode and any number of ranks returned, or this rank's part.

        What the flags of this run say of the optimizer (--momentum, --weight-decay, --fused) stays. Raises
        `ValueError` where the optimizer is another one.
        """
        model, optim = states
        groups = []
        for there, now in zip(optim["param_groups"], optimizer.param_groups, strict=True):
            if unknown := there.keys() - now.keys():
                raise ValueError(f"its optimizer has {', '.join(sorted(unknown))}")
            groups.append({**now, "params": there["params"]})
        optim = {**optim, "param_groups": groups}
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=model,
            optim_state_dict=optim,
            options=self._options(whole),
        )

    def _options(self, _whole: bool) -> StateDictOptions:
        return StateDictOptions()


class Shards(Replicas):
    """--parallel fsdp: parameters, gradients and optimizer state are divided among the ranks.

    Parameters are gathered layer by layer while it computes, and gradients are reduced to the part of each rank;
    the optimizer only ever sees parts.
    """

    def _place(self, module: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world,))
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = HALF.get(self.config.amp)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else exact
        # fully_shard takes contiguous parameters only; channels_last inputs alone decide how convolutions compute.
        module = super()._place(module).to(memory_format=torch.contiguous_format)
        self.layers = list(_layers(module))
        for layer in self.layers:
            norms = [part for part in layer.modules() if isinstance(part, _BatchNorm)]
            # PyTorch has no BatchNorm with weights in half precision and statistics in float32.
            if half and norms:
                fully_shard(norms, mesh=mesh, mp_policy=exact)
            if layer not in norms or not half:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self.config.compile:
            # Compiled as a whole it would run uncompiled, without a word: the hooks that gather parameters break
            # every graph. All layers of one class count against one limit.
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * len(self.layers)
            )
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward)
        return module

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduces all the same: a rank that kept gradients to itself would need the memory for all of them."""
        return nullcontext()

    def precision(self) -> AbstractContextManager[Any]:
        """Nothing: the layers themselves compute in half precision."""
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        return super().gradient_norm().full_tensor()

    def _options(self, whole: bool) -> StateDictOptions:
        # With cpu_offload rank 0 alone keeps what was gathered.
        return StateDictOptions(
            full_state_dict=whole, cpu_offload=whole and not self.config.snapshot_per_node
        )


@contextmanager
def single_samples_explained() -> Iterator[None]:
    """Raises `TrainError` instead of BatchNorm's refusal to train on one sample."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # torch.distributed.pipelining wraps it in a RuntimeError.
        if "more than 1 value per channel" not in f"{error} {error.__cause__}":
            raise
        raise TrainError(
            "a piece of the batch has one sample, and BatchNorm cannot train on one value per channel: give another "
            "--batch-size (the last batch of an epoch counts, too), larger pieces, that is a larger --split-size, "
            "fewer --microbatches or less --accumulate, or a larger --image-size"
        ) from error


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of `module` that are gathered one at a time: its children that hold parameters; lists and
    dictionaries of layers are never called themselves, so their entries count."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _layers(child)
        elif next(child.parameters(), None) is not None:
            yield child


def build(config: Config, ranks: Ranks, module: nn.Module, *, shape: Sequence[int]) -> Replicas:
    """The module, for inputs of `shape`, spread as --parallel says. Raises `UsageError` where devices or ranks are too few."""
    if config.parallel == "ddp":
        return Replicas(config, ranks, module, shape)
    if config.parallel == "fsdp":
        if ranks.is_main and ranks.world == 1:
            print(
                "--parallel fsdp with one rank divides nothing: it works, and is slower than ddp", flush=True
            )
        return Shards(config, ranks, module, shape)
    from train import pipeline

    return pipeline.build(config, ranks, module, shape)
