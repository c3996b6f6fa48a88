"""torch's DistributedDataParallel with the constructor of SageMaker's version 1. Only the synchronization of
buffers differs from torch's.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from smdistributed.dataparallel.torch import distributed

__all__ = ["DistributedDataParallel"]

_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
# torch 2.13 renamed it and warns about the old name.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """A module whose gradients are averaged over all ranks during the backward pass.

    The parameters are torch's of the same names. Raises RuntimeError before init_process_group(), ValueError
    for a process group other than WORLD.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,
        process_group: object = None,
        bucket_cap_mb: int | None = None,
    ) -> None:
        distributed.check_call(process_group)
        options: dict[str, Any] = {_SYNC_BUFFERS: broadcast_buffers}
        super().__init__(
            module, device_ids=device_ids, output_device=output_device, bucket_cap_mb=bucket_cap_mb, **options
        )

    # Scripts for this interface test on rank 0 alone. With torch's, rank 0 would send buffers that no rank
    # receives, and after a pass without gradients skip the next synchronization, for which the other ranks
    # wait.

    def will_sync_module_buffers(self) -> bool:
        """Return whether a forward pass sends rank 0's buffers to all ranks: only while training."""
        return bool(self.training and super().will_sync_module_buffers())

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the module. In evaluation mode no rank waits for another, unless gradients are
        enabled."""
        next_sync = self.require_forward_param_sync
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            if not self.training:
                self.require_forward_param_sync = next_sync
