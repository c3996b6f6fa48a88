"""Cancelling a job on a node: `kill`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from cloudddp.agent.protocol.codec import (
    check_job_id,
    check_length,
    check_range,
)
from cloudddp.agent.protocol.jobs import MAX_GRACE, MAX_PID, MAX_RANKS
from cloudddp.agent.protocol.phases import MAX_TOKEN, JobPhase
from cloudddp.agent.protocol.training import TrainingStatus


@dataclass(frozen=True)
class KillReply:
    """How many processes were ended, how many of them were `ranks`, and how many survived. `phase` is None
    for a job that the node does not have; it will refuse to start it. `started`: a rank was started there."""

    ended: int
    left: int
    ranks: int = 0
    phase: Optional[JobPhase] = None
    training: Optional[TrainingStatus] = None
    started: bool = True

    def __post_init__(self) -> None:
        check_range("ended", self.ended, 0, MAX_PID)
        check_range("left", self.left, 0, MAX_PID)
        check_range("ranks", self.ranks, 0, MAX_RANKS)


@dataclass(frozen=True)
class KillRequest:
    """Cancel a job: end every process of it on this node, SIGTERM, and SIGKILL after `grace` seconds. The
    supervisor of the node tells the others. `token` is the same on all nodes, and no other cancel has it."""

    job: str
    grace: float
    token: str

    STEP = "kill"
    REPLY = KillReply

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("grace", self.grace, 0, MAX_GRACE)
        check_length("token", self.token, MAX_TOKEN)
