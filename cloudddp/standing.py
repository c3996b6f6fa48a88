"""Where a training is, as its script itself told: which step of how many, the best accuracy, how it left off. Pure.

Rank 0 writes it, as JSON, into the file that CLOUDDDP_STATUS_FILE names; the agent passes on the keys that are known.
It is the script's word: what a job did is told by exit codes, never by this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Optional

PREEMPTED = 143  # the exit code of a rank that was told to stop (SIGTERM) and has saved a snapshot


@dataclass(frozen=True)
class Standing:
    """The last word of rank 0. `state` is running, finished, failed or preempted (told to stop; a snapshot is there);
    `told` is when it was written, in seconds since the epoch by its node's clock. None: not told."""

    told: float
    state: Optional[Literal["running", "finished", "failed", "preempted"]] = None
    step: Optional[int] = None
    steps: Optional[int] = None
    best_accuracy: Optional[float] = None

    def __post_init__(self) -> None:
        for name, value in (
            ("step", self.step),
            ("steps", self.steps),
            ("best_accuracy", self.best_accuracy),
        ):
            if value is not None and not -(1 << 53) <= value <= 1 << 53:
                raise ValueError(f"{name} is out of range")
        if not 0 <= self.told <= 1e11:
            raise ValueError("told is out of range")

    @property
    def preempted(self) -> bool:
        return self.state == "preempted"

    @property
    def place(self) -> str:
        """`step 120 of 3000`, or '' where no step was told."""
        if self.step is None:
            return ""
        return f"step {self.step}" + (f" of {self.steps}" if self.steps is not None else "")

    @property
    def text(self) -> str:
        """`step 120 of 3000, best accuracy 0.9861`, as much of it as was told."""
        best = "" if self.best_accuracy is None else f"best accuracy {self.best_accuracy:.4f}"
        return ", ".join(part for part in (self.place, best) if part)

    @property
    def stopped(self) -> str:
        """What a person needs to know of a job that was told to stop, or ''."""
        if self.preempted:
            return f"stopped{f' after {self.place}' if self.place else ''}, with a snapshot"
        return f"last told of {self.text}" if self.text else ""


def among(replies: Iterable[Standing | None]) -> Standing | None:
    """Return where a training is, from what each node's agent reports. At most one node knows, the one that runs
    rank 0; None where nothing has been reported."""
    return next((reply for reply in replies if reply is not None), None)
