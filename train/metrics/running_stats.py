"""Sums over all ranks since the last log line and since the epoch started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from train.distributed.communicator import Communicator
from train.metrics.throughput import StepTimer


class RunningStats:
    """Sums of the `width` numbers of a step, seconds waiting for data, and seconds.

    They continue over an interruption: `state` goes into the snapshot.
    """

    def __init__(self, comm: Communicator, width: int) -> None:
        self.comm = comm
        self.timer = StepTimer()
        self.steps = 0
        """Steps since the last line."""
        # Over all ranks, without the steps since the last line.
        self.epoch = torch.zeros(width + 2, dtype=torch.float64)
        # Of this rank, since the last line.
        self._steps = torch.zeros(width, dtype=torch.float64, device=comm.device)
        # Of a line that began before an interruption.
        self._carried = torch.zeros(width + 2, dtype=torch.float64)

    def start_epoch(self) -> None:
        self.steps = 0
        for sums in (self.epoch, self._steps, self._carried):
            sums.zero_()

    def add_step(self, sums: Tensor) -> None:
        """Add this rank's numbers of one step."""
        self.steps += 1
        self._steps += sums

    def since_line(self) -> Tensor:
        """Return the sums since the last line. Collective."""
        own = torch.cat([self._steps, self._steps.new_tensor(self.timer.seconds())])
        return self.comm.sum(own).cpu() + self._carried

    def finish_line(self) -> Tensor:
        """Return the sums since the last line, add them to those of the epoch, and start a new line.
        Collective."""
        sums = self.since_line()
        self.steps = 0
        self._steps.zero_()
        self._carried.zero_()
        self.timer.restart()
        self.epoch += sums
        return sums

    def state(self) -> dict[str, Any]:
        """Return what a snapshot holds of these sums. Collective."""
        return {
            "epoch_sums": self.epoch.tolist(),
            "line_sums": self.since_line().tolist(),
            "line_steps": self.steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        epoch = torch.tensor(state["epoch_sums"], dtype=torch.float64)
        carried = torch.tensor(state["line_sums"], dtype=torch.float64)
        if not epoch.shape == carried.shape == self.epoch.shape:
            raise ValueError(f"epoch_sums holds {epoch.numel()} numbers instead of {self.epoch.numel()}")
        self.epoch, self._carried = epoch, carried
        self.steps = state["line_steps"]
