"""The measurements of `python -m bench.train.sweep`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.sweep_config import Sweep
from train import models
from train.errors import UsageError
from train.parallel.strategy import explained
from train.parallel.two_devices import TwoDevices, device_pair

CLASSES = 1000
CPU_NOTE = (
    "Both devices are the CPU of this machine: this shows that the modes work, and says nothing about speed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one mode, in seconds per step: median, minimum and maximum.

    `split_size` is 0 where the batch passes in one chunk. `against_one_device` is the speed relative to one
    device; None on a CPU, where there is no second device.
    """

    mode: str
    split_size: int
    copy_stream: bool
    seconds: float
    least: float
    most: float
    images_per_second: float
    against_one_device: float | None


def measure(sweep: Sweep) -> dict[str, Any]:
    """Measure every mode and print a line of the table after each. Returns what --json writes.

    Raises `UsageError` if there are too few GPUs.
    """
    devices = _devices(sweep)
    on_gpu = devices[0].type == "cuda"
    device_name = torch.cuda.get_device_name(devices[0]) if on_gpu else "CPU"
    note = "" if on_gpu else CPU_NOTE
    _print_header(sweep, device_name, note)

    torch.manual_seed(0)
    shape = (3, sweep.image_size, sweep.image_size)
    module = models.build(sweep.model, shape=shape, classes=CLASSES, seed=0)
    inputs = torch.randn(sweep.batch_size, *shape).to(devices[0])
    labels = torch.randint(0, CLASSES, (sweep.batch_size,))
    rows: list[Row] = []
    for mode, split_size, copy_stream, model in _modes(sweep, module, devices):
        with explained():
            seconds = _time(sweep, model, inputs, labels.to(devices[mode != "one device"]))
        median = statistics.median(seconds)
        row = Row(
            mode=mode,
            split_size=split_size,
            copy_stream=copy_stream,
            seconds=median,
            least=min(seconds),
            most=max(seconds),
            images_per_second=sweep.batch_size / median,
            against_one_device=(rows[0].seconds if rows else median) / median if on_gpu else None,
        )
        rows.append(row)
        print(_line(row), flush=True)
    own = {"device": devices[0].type, "name": device_name, "torch": str(torch.__version__)}
    settings = {**asdict(sweep), **own}
    return {"settings": settings, "note": note, "rows": [asdict(row) for row in rows]}


def _print_header(sweep: Sweep, device_name: str, note: str) -> None:
    print(
        f"{sweep.model}, batch size {sweep.batch_size}, images 3x{sweep.image_size}x{sweep.image_size}, "
        f"{device_name}, torch {torch.__version__}; seconds per step, median of "
        f"{sweep.repeats} x {sweep.steps} steps"
    )
    if note:
        print(note)
    print(f"{'mode':<26}{'seconds':>10}{'min':>10}{'max':>10}{'images/s':>11}{'gain':>8}", flush=True)


def _devices(sweep: Sweep) -> tuple[torch.device, torch.device]:
    if sweep.device == "cpu" or (sweep.device == "auto" and not torch.cuda.is_available()):
        return device_pair(torch.device("cpu"))
    count = torch.cuda.device_count()
    if count < 2:
        raise UsageError(
            f"the sweep needs two GPUs, and torch finds {count}: give --device cpu to try it out"
        )
    return device_pair(torch.device("cuda", 0))


def _modes(
    sweep: Sweep, module: nn.Module, devices: tuple[torch.device, torch.device]
) -> Iterator[tuple[str, int, bool, nn.Module]]:
    """Yield (mode, split size, copy stream, model) of each line. All share the weights of `module`, which
    moves."""
    yield "one device", 0, False, module.to(devices[0])
    for copy_stream in (False, True) if devices[0].type == "cuda" else (False,):
        for size in ([] if copy_stream else [0]) + sweep.split_sizes:
            model = TwoDevices(module, devices, split_size=size, copy_stream=copy_stream)
            yield "pipeline" if size else "two devices, naive", size, copy_stream, model


def _time(sweep: Sweep, model: nn.Module, inputs: Tensor, labels: Tensor) -> list[float]:
    """Return the seconds per step of each repeat, without the warm-up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model.train()
    seconds = []
    for _ in range(sweep.repeats + 1):
        started = time.perf_counter()
        for _ in range(sweep.steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if inputs.device.type == "cuda":
            for device in {inputs.device, labels.device}:
                torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - started) / sweep.steps)
    return seconds[1:]


def _line(row: Row) -> str:
    name = row.mode + (f", chunks of {row.split_size}" if row.split_size else "")
    name += " *" if row.copy_stream else ""
    gain = "-" if row.against_one_device is None else f"{100 * (row.against_one_device - 1):+.0f}%"
    times = "".join(f"{value:>10.4f}" for value in (row.seconds, row.least, row.most))
    return f"{name:<26}{times}{row.images_per_second:>11.1f}{gain:>8}" + (
        "  (* copy stream)" if row.copy_stream else ""
    )
