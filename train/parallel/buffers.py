"""Buffers of a model, such as BatchNorm's running statistics, which a forward pass changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_preserved(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` at the end of the block."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
