"""Training speed: throughput, the share of time spent waiting for data, memory, and MFU (model FLOPs
utilization).

MFU is the FLOPs of the model itself as a share of the GPU's peak. What a log line needs from every rank are
numbers that can be summed, so they are part of the same reduction as the losses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

# Dense fp16/bf16 tensor throughput in FLOP/s. The first entry whose words are all in the device's name
# applies. From NVIDIA's data sheets (halved where they state it with sparsity) as quoted in
# pytorch/torchtitan tools/utils.py (A100, H100, H200, B200, L40S) and Lightning
# fabric/utilities/throughput.py (V100, T4); L4: its data sheet states 242 with sparsity. V100 and T4 have no
# bf16: the value is for fp16. The A10G is missing because sources disagree (70 and 125).
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2.25e15),
    ("H200 NVL", 836e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("T4", 65e12),
    ("V100 PCIE", 112e12),
    ("V100", 125e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of the device in dense fp16/bf16 FLOP/s; None for the CPU and for a GPU that is not
    listed."""
    return peak_flops_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_by_name(name: str) -> float | None:
    """Return the peak of the GPU with this name, such as "Tesla V100-SXM2-16GB"; None if it is not listed."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return next((peak for key, peak in PEAK_FLOPS if words.issuperset(key.upper().split())), None)


def training_flops(module: nn.Module, forward: Callable[[Any, Any], Any], example: Any) -> float | None:
    """Return the FLOPs of the forward and the backward pass for one sample; a multiply-add counts as two.

    `forward` applies the module to a batch, and `example` is one of two samples, on any device; nothing is
    computed and the module does not change. None for a module that cannot run without data, for example
    because its control flow depends on values. Give the plain module, before it is wrapped, compiled or
    sharded.
    """
    meta = {
        name: torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }

    def call(*values: Any, **named: Any) -> Any:
        return functional_call(module, meta, values, named)

    batch = pytree.tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, example)
    # Layers that draw random numbers draw none on the meta device; fork_rng is for those that draw on
    # another.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        try:
            outputs = [one for one in pytree.tree_leaves(forward(call, batch)) if isinstance(one, Tensor)]
            torch.stack([one.sum() for one in outputs if one.requires_grad]).sum().backward()
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
    return float(counter.get_total_flops()) / 2


class StepTimer:
    """Time since the last log line on this rank, and the part of it spent waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset all counters."""
        self.data_seconds = 0.0
        self._started = time.perf_counter()

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches. The time to get one counts as waiting for data."""
        source = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.data_seconds += time.perf_counter() - started
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the block, for example on a snapshot."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - started

    def seconds(self) -> list[float]:
        """Return [seconds waiting for data, seconds in total], to be summed over ranks.

        On a GPU read it after something that waits for the device, or the work still queued there is missing.
        """
        return [self.data_seconds, time.perf_counter() - self._started]


def rates(
    seconds: Sequence[float],
    *,
    steps: int,
    samples: float,
    world_size: int,
    flops: float | None = None,
    peak: float | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Return the speed figures of a log line, from `StepTimer.seconds` and the samples summed over all ranks.

    `flops` is per sample; `peak` is the device's FLOP/s. The keys: samples_per_second (global),
    samples_per_second_per_device, step_seconds, data_wait (0 to 1: how long the processes waited for batches;
    where the GPU lags behind them this is more than the GPU waited), and, where they are known, mfu (0 to 1)
    and peak_memory_bytes (of this rank's GPU, since the process started).
    """
    data_seconds, total_seconds = seconds
    per_device = samples / total_seconds if total_seconds > 0 else 0.0  # both are sums over the ranks
    values = {
        "samples_per_second": per_device * world_size,
        "samples_per_second_per_device": per_device,
        "step_seconds": total_seconds / (world_size * max(steps, 1)),
        "data_wait": data_seconds / total_seconds if total_seconds > 0 else 0.0,
    }
    if flops is not None and peak is not None:
        values["mfu"] = per_device * flops / peak
    if device is not None and device.type == "cuda":
        values["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return values
