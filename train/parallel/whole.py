"""Tensors of which each rank may hold a part, and the whole ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def whole(value: Tensor) -> Tensor:
    """Return the whole tensor on the CPU. Called by every rank that holds a part of it."""
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu()


@torch.no_grad()
def fill(value: Tensor, full: Tensor) -> None:
    """Copy the whole tensor `full` into `value`, or this rank's part of it. Raises `ValueError` for another shape."""
    if value.shape != full.shape:
        raise ValueError(f"a tensor of the shape {tuple(full.shape)} instead of {tuple(value.shape)}")
    if isinstance(value, DTensor):
        local = full.to(value.to_local().device, value.dtype)
        # Every rank has read the same one: nothing has to be sent.
        full = distribute_tensor(local, value.device_mesh, value.placements, src_data_rank=None)
    value.copy_(full)
