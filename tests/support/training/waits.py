"""Counts what makes the host wait: for a device, and for other ranks. There is no GPU in the tests, so these
are the calls that would wait for one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CountWaits(TorchFunctionMode):
    """Counts the calls for which the host would wait for a GPU: reads, and copies of numbers or tensors to
    the device."""

    READS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero)
    READS += (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__)
    FROM_NUMBERS = (torch.tensor, torch.as_tensor)
    ON_CPU = ("torch.optim", "torch.utils.data", "train.data.sampler")  # their numbers are not on the device
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(self.ON_CPU):
            self.count += func in self.READS or (
                caller.startswith("train.") and self._copies(func, args, kwargs)
            )
        return func(*args, **kwargs)

    def _copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func is Tensor.new_tensor or func is Tensor.cuda:
            return True
        if func in self.FROM_NUMBERS:
            return "device" in kwargs
        to_device = any(isinstance(one, (torch.device, str)) for one in (*args, *kwargs.values()))
        return func is Tensor.to and to_device and not kwargs.get("non_blocking")


@dataclass
class Collectives:
    """How many operations with the other ranks were started. Those of DDP itself, in C++, are not counted."""

    blocking: int = 0
    background: int = 0


@contextmanager
def counted_collectives() -> Iterator[Collectives]:
    """Count the calls of torch.distributed in the block."""
    counts = Collectives()
    names = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce", "send", "recv")
    before = {name: getattr(dist, name) for name in names}

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("async_op"):
                counts.background += 1
            else:
                counts.blocking += 1
            return call(*args, **kwargs)

        return counted

    try:
        for name, call in before.items():
            setattr(dist, name, counting(call))
        yield counts
    finally:
        for name, call in before.items():
            setattr(dist, name, call)
