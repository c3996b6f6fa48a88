"""How far the ranks of a job are, as they report it themselves: the status of the training, the pace of each
rank, the stragglers, which hold the others up, and a stall.

Rank 0 writes the status (step, best accuracy, how it stopped) as JSON to the file that CLOUDDDP_STATUS_FILE
names; the agent forwards the known keys. It is only the script's report: whether a job failed is decided by
exit codes.

The pace is the time of a rank's own work: loading its batch, forward and backward. The time from one step to
the next says nothing in synchronous data parallelism: every rank waits in the all-reduce for the slowest.
Others measure the same: MegaScale (NSDI '24, section 5), NVIDIA's resiliency extension
(nvidia-resiliency-ext, "Straggler Detection"), DDP's own logger (torch/csrc/distributed/c10d/logger.cpp).
Only the script knows where its work ends and the wait begins, so it has to report the time: train/ does, and
docs/how-to/progress.md shows how. For ranks that report steps only, the interval between them is compared,
which finds the slow ones where ranks do not wait for each other at every step.

A rank writes `{"step": 1200, "work_seconds": 0.21}` to the file that CLOUDDDP_STEP_FILE names: the time per
step since its last report.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, Number, Text, Time, at_most, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import NodeRank, Rank

PREEMPTED_EXIT_CODE = 143  # of a rank that received SIGTERM and has saved a snapshot


class TrainingState(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"  # stopped by SIGTERM, after a snapshot


@frozen
class TrainingStatus:
    """The last report of rank 0. `reported` is when, in seconds since the epoch by its node's clock. A field
    is None where the script did not report it."""

    reported: Time
    state: Optional[TrainingState] = None
    step: Optional[Number] = None
    steps: Optional[Number] = None
    best_accuracy: Optional[Annotated[float, within(-MAX_COUNT, MAX_COUNT)]] = None

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


SLOW = 1.5  # times the median: a straggler
RECOVERED = 1.25  # times the median: no longer one
MAX_STRAGGLERS = 16  # that are kept of a job
MAX_STEP_SECONDS = 1e6


@frozen
class StepReport:
    """The last report of a rank. `work_seconds` is the time of its own work per step, None where it does not
    report it."""

    step: Number
    work_seconds: Optional[Annotated[float, within(0, MAX_STEP_SECONDS)]] = None


@frozen
class Pace:
    """How long a step took on a rank recently: the median of its last reports. `own`: of its own work, else
    from one report to the next."""

    rank: Rank
    step: Number
    seconds: Annotated[float, within(0, MAX_STEP_SECONDS)]
    own: bool = False


@frozen
class Straggler:
    """A rank that stayed slower than the others. `seconds` and `median` (of all ranks) are per step, as they
    were when it was last looked at; `own` as in Pace. `step`, `since`: where the rank was when it became
    slow, and when, in seconds since the epoch; `until`: when it had caught up, None while it has not."""

    rank: Rank
    node: NodeRank
    seconds: Annotated[float, within(0, MAX_STEP_SECONDS)]
    median: Annotated[float, within(0, MAX_STEP_SECONDS)]
    step: Number
    since: Time
    own: bool = False
    until: Optional[Time] = None

    @property
    def ratio(self) -> float:
        """How many times as long as the median a step takes."""
        return self.seconds / self.median if self.median > 0 else 0.0

    @property
    def text(self) -> str:
        """`rank 3 takes 2.1 x as long as the median rank (0.42 s of its own work per step, median 0.2 s)`."""
        what = "of its own work per step" if self.own else "per step"
        return (
            f"rank {self.rank} takes {self.ratio:.1f} x as long as the median rank "
            f"({self.seconds:.3g} s {what}, median {self.median:.3g} s)"
        )


KnownStragglers = Annotated[tuple[Straggler, ...], at_most(MAX_STRAGGLERS)]


@frozen
class Stragglers:
    """For each rank the last time that it was slow: what each node keeps with a job."""

    known: tuple[Straggler, ...] = ()


def current_stragglers(known: Iterable[Straggler]) -> tuple[Straggler, ...]:
    """Return those that have not caught up, by rank."""
    return tuple(sorted((one for one in known if one.until is None), key=lambda one: one.rank))


@frozen
class ToleratedStall:
    """`detail` says for how long no rank did anything, and where each one was. `since` is when that was
    noticed, in seconds since the epoch; `until`: when a rank did something again, None while none has."""

    since: Time
    detail: Text
    until: Optional[Time] = None
