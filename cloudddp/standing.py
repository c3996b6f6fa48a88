"""Where a training is, as its script itself told: which step of how many, the best accuracy, how it left off. Pure.

Rank 0 writes it, as JSON, into the file that CLOUDDDP_STATUS_FILE names; the agent passes on the keys that are known.
It is the script's word: what a job did is told by exit codes, never by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREEMPTED = 143  # the exit code of a rank that was told to stop (SIGTERM) and has saved a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The last word of rank 0. `state` is running, finished, failed or preempted (told to stop; a snapshot is there);
    `told` is when it was written, in seconds since the epoch by its node's clock. None: not told."""

    state: str | None
    step: int | None
    steps: int | None
    best_accuracy: float | None
    told: float

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


def among(answers: Iterable[Mapping[str, Any]]) -> Standing | None:
    """Return what the nodes' agents answered of a training. One node at most knows, the one that runs rank 0; None
    where nothing has been told."""
    for answer in answers:
        if words := answer.get("standing"):
            return Standing(
                state=words.get("state"),
                step=words.get("step"),
                steps=words.get("steps"),
                best_accuracy=words.get("best_accuracy"),
                told=float(words["told"]),
            )
    return None
