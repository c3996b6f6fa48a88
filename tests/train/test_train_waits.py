"""What the host waits for in a step: once for the device.

On a GPU each further wait would leave the device without work until the host has launched the next kernels.
There is no GPU in the tests, so these are the calls that would wait for one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training.small_trainer import single_process, small_trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from train.config import make
from train.data.datasets import load
from train.task import next_token, regression

pytestmark = pytest.mark.torch


class CountWaits(TorchFunctionMode):
    """Counts reads, and copies of numbers or tensors to the device."""

    READS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero)
    READS += (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__)
    ON_CPU = ("torch.optim", "torch.utils.data", "train.data.sampler")  # their numbers are not on the device
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(self.ON_CPU):
            copies = caller.startswith("train.") and self._copies(func, args, kwargs)
            self.count += func in self.READS or copies
        return func(*args, **kwargs)

    def _copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func is Tensor.new_tensor or func is Tensor.cuda:
            return True
        if func in (torch.tensor, torch.as_tensor):
            return "device" in kwargs
        to_device = any(isinstance(one, (torch.device, str)) for one in (*args, *kwargs.values()))
        return func is Tensor.to and to_device and not kwargs.get("non_blocking")


@pytest.mark.parametrize(
    "flags", [{}, {"clip": 1.0, "augment": True, "accumulate": 2, "ema": 0.9, "amp": "bf16"}], ids=str
)
def test_step_waits_for_the_device_once(tmp_path: Path, flags: dict[str, Any]) -> None:
    trainer = small_trainer(single_process(), tmp_path, **flags)
    for batch, counts in trainer.train_reader.batches():
        with CountWaits() as waits:
            trainer.train_step(batch, counts)
        assert waits.count == 1  # for the norm of the gradients, which must be finite, and requests to stop


def test_pixels_and_losses_are_computed_without_a_wait() -> None:
    pytest.importorskip("sklearn")
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    data = load(make(dataset="digits"), download=False)
    batch = data.example()
    with CountWaits() as waits:
        data.preprocess(batch)
        data.task.sums(torch.zeros(2, 10), batch)
        regression().sums(torch.zeros(2, 1), (None, torch.zeros(2)))
        next_token().sums(torch.zeros(2, 3, 5), (tokens, tokens))
    assert waits.count == 0
