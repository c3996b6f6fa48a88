"""Sums over all ranks since the last log line and since the epoch started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from train.distributed.communicator import Communicator
from train.record.throughput import StepTimer


class RunningStats:
    """Sums of [loss, correct, correct in top 5, samples, seconds waiting for data, seconds].

    They continue over an interruption: `state` goes into the snapshot.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.timer = StepTimer()
        self.epoch = torch.zeros(
            6, dtype=torch.float64
        )  # over all ranks, without the steps since the last line
        self._steps = torch.zeros(
            4, dtype=torch.float64, device=comm.device
        )  # of this rank, since the last line
        self._carried = torch.zeros(6, dtype=torch.float64)  # of a line that began before an interruption

    def start_epoch(self) -> None:
        self.epoch.zero_()
        self._carried.zero_()

    def add_step(self, sums: Tensor) -> None:
        """Add this rank's [loss, correct, correct in top 5, samples] of one step."""
        self._steps += sums

    def since_line(self) -> Tensor:
        """Return the sums since the last line. Collective."""
        own = torch.cat([self._steps, self._steps.new_tensor(self.timer.seconds())])
        return self.comm.sum(own).cpu() + self._carried

    def finish_line(self) -> Tensor:
        """Return the sums since the last line, add them to those of the epoch, and start a new line. Collective."""
        sums = self.since_line()
        self._steps.zero_()
        self._carried.zero_()
        self.timer.restart()
        self.epoch += sums
        return sums

    def state(self) -> dict[str, list[float]]:
        """Return what a snapshot holds of these sums. Collective."""
        return {"epoch_sums": self.epoch.tolist(), "line_sums": self.since_line().tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.epoch = torch.tensor(state["epoch_sums"], dtype=torch.float64)
        self._carried = torch.tensor(state["line_sums"], dtype=torch.float64)
