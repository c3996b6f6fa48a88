"""--snapshot-async: a snapshot is written by a thread, from a copy in memory, while the training
continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from train.distributed.communicator import Communicator


class Background:
    """One thread that writes one snapshot at a time. Created by all ranks: the thread has a process group of
    its own, so that its operations may overlap with those of the training."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.in_background()
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._work: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot was begun and `wait` was not called since."""
        return self._work is not None

    def start(self, work: Callable[..., None], *values: Any) -> None:
        """Call `work(*values)` in the thread."""
        self._work = self._thread.submit(work, *values)

    def wait(self) -> None:
        """Wait for the thread. Raises what the work has raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


def copied(state: Any) -> Any:
    """Return a copy of a state with its tensors on the CPU, so that the training may change the original.
    Parts of sharded tensors stay on their device."""

    def copy(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.detach().clone()
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    with torch.no_grad():
        return pytree.tree_map(copy, state)
