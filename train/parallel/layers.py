"""The layers of a model: which ones compute one after the other, how their activations are computed again in
the backward pass instead of kept (--activation-checkpointing), and their buffers, such as BatchNorm's running
statistics, which a forward pass changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(module: nn.Module) -> None:
    """Change the layers of `module` that hold parameters so that they keep only their inputs. Names stay the
    same."""
    for layer in layers_of(module):
        # The forward pass itself and not a wrapping module, which would add its name to those of the
        # parameters.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=partial(_contexts, layer)
        )


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of `module` that compute one after the other: its children that hold parameters.

    Lists and dictionaries of layers are never called themselves, so their entries are yielded instead.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from layers_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


@contextmanager
def buffers_preserved(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` at the end of the block."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    # The second time BatchNorm would count a batch again in its running statistics.
    return nullcontext(), buffers_preserved(layer)
