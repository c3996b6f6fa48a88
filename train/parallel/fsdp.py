"""--parallel fsdp: parameters, gradients and optimizer state are sharded over the ranks.

Parameters are gathered layer by layer during the computation, and gradients are reduced to the part of each rank; the
optimizer only ever sees that part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from train.parallel.ddp import HALF_PRECISION, DDPStrategy


class FSDPStrategy(DDPStrategy):
    """Every rank holds its part of each parameter, and takes its share of each batch."""

    def _place(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.comm.device.type, (self.comm.world_size,))
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = HALF_PRECISION.get(self.config.amp)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else exact
        # fully_shard takes contiguous parameters only; channels_last inputs alone decide how convolutions compute.
        module = super()._place(module).to(memory_format=torch.contiguous_format)
        self.layers = list(_layers(module))
        for layer in self.layers:
            norms: list[nn.Module] = [part for part in layer.modules() if isinstance(part, _BatchNorm)]
            # PyTorch has no BatchNorm with weights in half precision and statistics in float32.
            if half and norms:
                fully_shard(norms, mesh=mesh, mp_policy=exact)
            if layer not in norms or not half:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        return module

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self.config.compile:
            # Compiled as a whole it would silently run uncompiled: the hooks that gather parameters break every
            # graph. All layers of one class count against one limit.
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * len(self.layers)
            )
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward)
        return module

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduce gradients after every chunk: unreduced ones would need the memory of the whole gradient."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the layers themselves compute in half precision."""
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        norm = super().gradient_norm()
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def _state_options(self, whole: bool) -> StateDictOptions:
        # With cpu_offload only rank 0 keeps what was gathered.
        return StateDictOptions(
            full_state_dict=whole, cpu_offload=whole and not self.config.snapshot_per_node
        )


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of `module` that are gathered one at a time: its children that hold parameters.

    Lists and dictionaries of layers are never called themselves, so their entries are yielded instead.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _layers(child)
        elif next(child.parameters(), None) is not None:
            yield child
