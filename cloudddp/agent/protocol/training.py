"""The status of a training run, as its script reports it: step, best accuracy, how it stopped.

Rank 0 writes it as JSON to the file that CLOUDDDP_STATUS_FILE names; the agent forwards the known keys. It is
only the script's report: whether a job failed is decided by exit codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_TIME, check_range

PREEMPTED_EXIT_CODE = 143  # of a rank that received SIGTERM and has saved a snapshot


class TrainingState(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"  # stopped by SIGTERM, after a snapshot


@dataclass(frozen=True)
class TrainingStatus:
    """The last report of rank 0. `reported` is when, in seconds since the epoch by its node's clock. A field
    is None where the script did not report it."""

    reported: float
    state: Optional[TrainingState] = None
    step: Optional[int] = None
    steps: Optional[int] = None
    best_accuracy: Optional[float] = None

    def __post_init__(self) -> None:
        check_range("step", self.step, -MAX_COUNT, MAX_COUNT)
        check_range("steps", self.steps, -MAX_COUNT, MAX_COUNT)
        check_range("best_accuracy", self.best_accuracy, -MAX_COUNT, MAX_COUNT)
        check_range("reported", self.reported, 0, MAX_TIME)

    @staticmethod
    def from_replies(replies: Iterable[Optional[TrainingStatus]]) -> Optional[TrainingStatus]:
        """Return the status that one of the nodes reports. At most one does: the node that runs rank 0."""
        return next((reply for reply in replies if reply is not None), None)

    @property
    def preempted(self) -> bool:
        return self.state is TrainingState.PREEMPTED

    @property
    def progress(self) -> str:
        """`step 120 of 3000`, or '' where no step was reported."""
        if self.step is None:
            return ""
        return f"step {self.step}" + (f" of {self.steps}" if self.steps is not None else "")

    @property
    def text(self) -> str:
        """`step 120 of 3000, best accuracy 0.9861`, as far as it was reported."""
        best = "" if self.best_accuracy is None else f"best accuracy {self.best_accuracy:.4f}"
        return ", ".join(part for part in (self.progress, best) if part)

    @property
    def stopped(self) -> str:
        """How the training of a stopped job ended, or '': `stopped after step 120 of 3000, with a
        snapshot`."""
        if self.preempted:
            return f"stopped{f' after {self.progress}' if self.progress else ''}, with a snapshot"
        return f"last reported {self.text}" if self.text else ""
