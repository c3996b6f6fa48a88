"""How fast training is: throughput, the share of time spent waiting for data, memory, and MFU.

MFU is the share of the GPU's peak that the model's own arithmetic amounts to. What a log line needs of every rank
is numbers that add up, so they travel in the same reduction as the losses. This room must not know the training
loop or process groups.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

# Dense fp16/bf16 tensor throughput, FLOP/s, of the first line whose words are all in the device's name. From
# NVIDIA's data sheets (halved where they state it with sparsity) as quoted in pytorch/torchtitan tools/utils.py
# (A100, H100, H200, B200, L40S) and Lightning fabric/utilities/throughput.py (V100, T4); L4: its data sheet has
# 242 with sparsity. V100 and T4 have no bf16: fp16 is meant. The A10G is missing because sources contradict each
# other (70 and 125).
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
    """What the GPU could do at most, in dense fp16/bf16 FLOP/s; None for the CPU and for a GPU not listed."""
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """The peak of the GPU that calls itself `name`, such as "Tesla V100-SXM2-16GB"."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return next((peak for key, peak in PEAK_FLOPS if words.issuperset(key.upper().split())), None)


def training_flops(module: nn.Module, sample: Tensor) -> float | None:
    """FLOPs of the forward and the backward pass for one sample, a multiply-add counting as two. `sample` is
    [1, ...] as the model takes it, on any device; nothing is computed and the module stays as it is.

    None for a module that cannot run without data (its control flow depends on values, say). Give the plain
    module, before it is wrapped, compiled or sharded.
    """
    shadow = {
        name: torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    # Layers that draw random numbers draw none on the meta device; this is for those that do so on another.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        try:
            # Two of them: BatchNorm refuses a single value per channel.
            outputs = functional_call(module, shadow, (sample.to("meta").expand(2, *sample.shape[1:]),))
            outputs.sum().backward()
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
    return counter.get_total_flops() / 2


class Window:
    """The time since the last log line on this rank, and how much of it was waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.steps = 0
        self.data_seconds = 0.0
        self._begun = time.perf_counter()

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time that each takes to come is noted, and each counts as a step."""
        source = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.data_seconds += time.perf_counter() - begun
            self.steps += 1
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in here, a snapshot say, is not counted."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._begun += time.perf_counter() - begun

    def sums(self) -> list[float]:
        """[seconds of waiting for data, seconds in all]; to be added up over ranks. On a GPU read it after
        something that waits for the device, or the work still queued there is missing."""
        return [self.data_seconds, time.perf_counter() - self._begun]


def figures(
    sums: Sequence[float],
    *,
    steps: int,
    samples: float,
    world: int,
    flops: float | None = None,
    peak: float | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """What a log line says of a window, from `Window.sums` added over all `world` ranks, the steps it had, and
    the samples of all ranks. `flops` is per sample; `peak` is what the device could do per second.

    samples_per_second (global), samples_per_second_per_device, step_seconds, data_wait (0 to 1: how long the
    processes waited for batches; where the GPU lags behind them this is more than what the GPU waited), and, where
    they are known, mfu (0 to 1) and peak_memory_bytes (of this rank's GPU, since the process started).
    """
    data_seconds, seconds = sums
    per_device = samples / seconds if seconds > 0 else 0.0  # both are sums over the ranks
    values = {
        "samples_per_second": per_device * world,
        "samples_per_second_per_device": per_device,
        "step_seconds": seconds / (world * max(steps, 1)),
        "data_wait": data_seconds / seconds if seconds > 0 else 0.0,
    }
    if flops is not None and peak is not None:
        values["mfu"] = per_device * flops / peak
    if device is not None and device.type == "cuda":
        values["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return values
