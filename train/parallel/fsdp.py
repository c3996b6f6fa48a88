"""--parallel fsdp and hsdp: parameters, gradients and optimizer state are sharded over the ranks, or over
those of a group.

Parameters are gathered layer by layer during the computation, and gradients are reduced to the part of each
rank; the optimizer only ever sees that part.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.parallel.layers import layers_of
from train.parallel.strategy import AMP_DTYPES, Strategy


class FSDPStrategy(Strategy):
    """Every rank holds its part of each parameter, and takes its share of each batch. Gradients are reduced
    after every part of --accumulate: unreduced ones would need the memory of the whole gradient."""

    def _place(self, module: nn.Module) -> nn.Module:
        mesh = self._mesh()
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = AMP_DTYPES.get(self.config.precision.amp)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else exact
        # fully_shard takes contiguous parameters only; channels_last inputs alone decide how convolutions
        # compute.
        module = super()._place(module).to(memory_format=torch.contiguous_format)
        # Parts of one model, also where each rank has built it with other random numbers. Those of --parallel
        # tensor are parts already: its model is seeded.
        values = (*module.parameters(), *module.buffers())
        self.comm.broadcast(one for one in values if not isinstance(one, DTensor))
        self.layers = list(layers_of(module))
        for layer in self.layers:
            norms: list[nn.Module] = [part for part in layer.modules() if isinstance(part, _BatchNorm)]
            # PyTorch has no BatchNorm with weights in half precision and statistics in float32.
            if half and norms:
                fully_shard(norms, mesh=mesh, mp_policy=exact)
            if layer not in norms or not half:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        return module

    def _mesh(self) -> DeviceMesh:
        """Return the ranks that hold the parts of a parameter."""
        return init_device_mesh(self.comm.device.type, (self.comm.world_size,))

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self.config.precision.compile:
            # Compiled as a whole it would silently run uncompiled: the hooks that gather parameters break
            # every graph. All layers of one class count against one limit.
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * len(self.layers)
            )
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward)
        return module

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
            full_state_dict=whole, cpu_offload=whole and not self.config.snapshots.snapshot_per_node
        )


class HSDPStrategy(FSDPStrategy):
    """Every group of ranks holds the parameters once, each rank of it a part; gradients are averaged over the
    groups."""

    def _mesh(self) -> DeviceMesh:
        return group_mesh(self.config, self.comm)


def group_mesh(config: Config, comm: Communicator) -> DeviceMesh:
    """Return the ranks as (groups, ranks of a group)."""
    size = group_size(config, comm)
    return init_device_mesh(
        comm.device.type, (comm.world_size // size, size), mesh_dim_names=("groups", "ranks")
    )


def group_size(config: Config, comm: Communicator) -> int:
    """Return the ranks per group. Raises `UsageError` if --group-size does not divide the number of ranks."""
    size = config.parallel.group_size or comm.info.local_world_size
    if comm.world_size % size:
        raise UsageError(
            f"--parallel {config.parallel.parallel}: {comm.world_size} ranks cannot be divided into groups "
            f"of {size}; give another --group-size"
        )
    return size
