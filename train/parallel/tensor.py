"""--parallel tensor: the layers of a transformer are split over the ranks of a group, and parameters are
sharded over the groups.

In each block the first projections are split by columns and the second ones by rows (Shoeybi and others,
"Megatron-LM", 2019), so that a group exchanges activations twice per block and pass. The ranks of a group
take the same samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.models import Attention, Block
from train.parallel.fsdp import FSDPStrategy, group_mesh, group_size
from train.parallel.strategy import Part
from train.task import Batch, Task


class TensorStrategy(FSDPStrategy):
    """Rank r is member r % G of group r // G, for groups of G. A group takes its share of each batch."""

    def __init__(
        self, config: Config, comm: Communicator, module: nn.Module, task: Task, example: Callable[[], Batch]
    ) -> None:
        # What a layer returns is a view, which FSDP warns of. No layer changes its inputs in place: the
        # weights are those of other modes (test_transformer_is_the_same_in_every_mode).
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        group = group_size(config, comm)
        self.mesh = group_mesh(config, comm)
        self.member = comm.rank % group
        super().__init__(config, comm, module, task, example)
        self.data_rank, self.data_world_size = comm.rank // group, comm.world_size // group

    def _place(self, module: nn.Module) -> nn.Module:
        split(module, self.mesh["ranks"])
        return super()._place(module)

    def _mesh(self) -> DeviceMesh:
        return self.mesh["groups"]

    def train_batch(self, parts: Sequence[Part], *, global_count: int) -> Tensor:
        """As in the base class. Only the first rank of a group counts what all of them have computed."""
        return self._counted(super().train_batch(parts, global_count=global_count))

    def evaluate(self, batch: Batch, count: int) -> Tensor:
        """As in the base class, and counted like a training batch."""
        return self._counted(super().evaluate(batch, count))

    def _counted(self, sums: Tensor) -> Tensor:
        return sums if self.member == 0 else torch.zeros_like(sums)


def split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the projections of the transformer's blocks over the ranks of `mesh`; every other parameter is on
    all of them. Raises `UsageError` where the heads cannot be divided."""
    plan: dict[str, ParallelStyle] = {}
    for name, part in module.named_modules():
        if isinstance(part, Attention) and part.heads % mesh.size():
            raise UsageError(
                f"--parallel tensor: {part.heads} attention heads cannot be divided over groups of "
                f"{mesh.size()} ranks; give another --group-size"
            )
        if isinstance(part, Block):
            plan |= {f"{name}.{one}": ColwiseParallel() for one in Block.SPLIT_BY_COLUMNS}
            plan |= {f"{name}.{one}": RowwiseParallel() for one in Block.SPLIT_BY_ROWS}
    for name, part in module.named_modules():
        if name not in plan and next(part.parameters(recurse=False), None) is not None:
            plan[name] = Replicated()
    parallelize_module(module, mesh, plan)


class Replicated(ParallelStyle):
    """A layer whose parameters are on every rank: DTensors like those that are split, as optimizers take
    either all or none of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(one, mesh, [Replicate()], run_check=False)
                if isinstance(one, Tensor)
                else one
                for one in inputs
            )

        def leave(_module: nn.Module, outputs: Any, _mesh: DeviceMesh) -> Any:
            return outputs.to_local() if isinstance(outputs, DTensor) else outputs

        return distribute_module(module, device_mesh, None, enter, leave)
