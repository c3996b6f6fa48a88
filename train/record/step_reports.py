"""Each rank's report of its steps, for a launcher that looks for stragglers: the step, and the time of the
rank's own work.

In synchronous training all ranks take the same time from one step to the next, since they wait for the
slowest in the all-reduce. A rank's own work is what differs: loading its batch, the forward pass, and the
backward pass until its last gradient. With DDP the rest of a step is communication, which goes on during the
backward pass and is awaited at its end. On a GPU the passes are timed with CUDA events, as on the host they
are only queued. (The wait of the compute stream for NCCL comes after the last gradient.)
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.hooks import Hook, Run

LAUNCHER_STEP_FILE = "CLOUDDDP_STEP_FILE"  # variable: where a launcher wants the steps of this rank
INTERVAL = 1.0  # seconds between two reports


class WorkTimer:
    """The time of this rank's own work. With `begin` a step begins, with `finish` it ends."""

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._device = device
        self._parameters = sum(parameter.requires_grad for parameter in model.parameters())
        self._begun: float | None = None  # on the host, until the forward pass begins
        self._in_step = self._in_forward = False
        self._gradients = 0
        self._host_seconds = 0.0
        self._first: Any = None
        self._passes: list[tuple[Any, Any]] = []
        # DDP broadcasts buffers between these two hooks, which waits for rank 0.
        model.register_forward_pre_hook(self._before_broadcast)
        model.module.register_forward_pre_hook(self._before_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def begin(self) -> None:
        """The step begins: the next batch is loaded."""
        self._begun, self._in_step = time.perf_counter(), True
        self._host_seconds, self._passes = 0.0, []

    def finish(self) -> float | None:
        """Return the seconds of work in this step; None if it had no whole backward pass. On a GPU the device
        has finished it."""
        self._in_step = self._in_forward = False
        if not self._passes:
            return None
        return self._host_seconds + sum(self._between(*one) for one in self._passes)

    def _before_broadcast(self, _module: nn.Module, _inputs: Any) -> None:
        if self._begun is not None:
            self._host_seconds += time.perf_counter() - self._begun
            self._begun = None
        self._in_forward = self._in_step

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if self._in_forward:
            self._first, self._gradients, self._in_forward = self._now(), 0, False

    def _after_gradient(self, _parameter: Tensor) -> None:
        self._gradients += 1
        if self._in_step and self._gradients == self._parameters:
            self._passes.append((self._first, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, first: Any, last: Any) -> float:
        seconds: float = last - first if self._device.type != "cuda" else first.elapsed_time(last) / 1000
        return seconds


class StepReports(Hook):
    """Writes the steps of this rank to the launcher's file, at most once a second. Does nothing without
    one."""

    def __init__(self, model: nn.Module, device: torch.device, *, compiled: bool = False) -> None:
        path = os.environ.get(LAUNCHER_STEP_FILE)
        self._path = Path(path) if path else None
        # Hooks would break the graph of torch.compile; FSDP and pipelines communicate within a pass.
        self._timer: WorkTimer | None = None
        if self._path and isinstance(model, DistributedDataParallel) and not compiled:
            self._timer = WorkTimer(model, device)
        self._seconds: list[float] = []  # of the steps since the last report
        self._reported = float("-inf")

    def begin_epoch(self, _run: Run) -> None:
        if self._timer is not None:
            self._timer.begin()

    def after_step(self, run: Run) -> None:
        """The step has ended, and the device has finished it; the next one begins with the loading of its
        batch."""
        self._finish(run.step)
        if self._timer is not None:
            self._timer.begin()

    def _finish(self, step: int) -> None:
        if self._path is None:
            return
        seconds = self._timer.finish() if self._timer is not None else None
        if seconds is not None:
            self._seconds.append(seconds)
        now = time.monotonic()
        if now - self._reported < INTERVAL:
            return
        self._reported = now
        work = {"work_seconds": sum(self._seconds) / len(self._seconds)} if self._seconds else {}
        self._seconds = []
        with suppress(OSError):  # no reason to fail a training run
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            temporary.write_text(json.dumps({"step": step, **work}) + "\n", encoding="utf-8")
            temporary.replace(self._path)
