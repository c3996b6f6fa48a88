"""The verdict: how a job ended on all its nodes, and what failed first. Every node keeps the same one;
`conclude` gives it to a node that could not take part."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import (
    MAX_TEXT,
    MAX_TIME,
    ProtocolError,
    check_job_id,
    check_length,
    check_range,
)
from cloudddp.agent.protocol.phases import MAX_NODES, MAX_RANK, MAX_RESTARTS, JobPhase

MAX_LINES = 50  # of the rank that failed first
MAX_LINE = 1000  # characters of each
MAX_AGO = 1e8  # seconds


def check_lines(lines: tuple[str, ...]) -> None:
    """Raise ProtocolError for too many lines, or a line that is too long."""
    check_length("last_lines", lines, MAX_LINES)
    for line in lines:
        check_length("a line", line, MAX_LINE)


class Cause(Enum):
    """Why a job failed."""

    RANK = "rank"  # a rank exited with a code other than 0, or was ended by a signal
    MEMORY = "memory"  # the kernel's OOM killer ended a rank, or its launcher
    DISK = "disk"  # a rank failed, and the node's disk is full
    LAUNCHER = "launcher"  # torchrun ended although no rank had failed
    START = "start"  # a process could not be started
    AGENT = "agent"  # the agent of a node has ended without a report
    SILENT = "silent"  # a node's agent sent no heartbeat
    STALL = "stall"  # no rank did anything
    PREFLIGHT = "preflight"  # the nodes differ, or one has a defect
    UNREACHABLE = "unreachable"  # a node could not connect to another one before the job began
    SNAPSHOT = "snapshot"  # the newest snapshot was not copied to a node
    # The node is about to end, and the ranks were told to save: AWS gave notice, or the deadline is near.
    NOTICE = "notice"


@dataclass(frozen=True)
class Exited:
    """A rank that had exited with code 0, `ago` seconds before the failure or the message that holds this, as
    the first of several: `others` had, too. `likely`: what the failed rank has written says that it lost a
    connection, or waited."""

    node: int
    rank: int
    ago: float
    others: int = 0
    likely: bool = False

    def __post_init__(self) -> None:
        check_range("node", self.node, 0, MAX_NODES)
        check_range("rank", self.rank, 0, MAX_RANK)
        check_range("ago", self.ago, 0, MAX_AGO)
        check_range("others", self.others, 0, MAX_RANK)


@dataclass(frozen=True)
class Failure:
    """What failed on `node`. `rank`, `exit_code` and `signal` are None where no rank's own end is the cause.
    `detail` is text that a program wrote; `peer` is the other node of a connection that failed; `exited` a
    rank that had left."""

    node: int
    cause: Cause
    rank: Optional[int] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    detail: str = ""
    peer: Optional[int] = None
    exited: Optional[Exited] = None

    def __post_init__(self) -> None:
        check_range("node", self.node, 0, MAX_NODES)
        check_range("rank", self.rank, 0, MAX_RANK)
        check_range("exit_code", self.exit_code, 0, 255)
        check_range("signal", self.signal, 1, 64)
        check_length("detail", self.detail, MAX_TEXT)
        check_range("peer", self.peer, 0, MAX_NODES)


@dataclass(frozen=True)
class Verdict:
    """How a job ended on all its nodes: the same on each of them. `first` is what failed first, with the
    `last_lines` of its rank or launcher. `decided_by` is the node that decided: the first one that was left.
    `restarts` is how often the job was started again, and `refusal` why not once more, '' where it was not
    asked for. `at` is when it was given, by the clock of the node that decided: the end of the job, also for
    a node that learns of it later."""

    phase: JobPhase
    exit_code: int
    decided_by: int
    first: Optional[Failure] = None
    last_lines: tuple[str, ...] = ()
    restarts: int = 0
    refusal: str = ""
    at: Optional[float] = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_range("at", self.at, 0, MAX_TIME)
        check_range("restarts", self.restarts, 0, MAX_RESTARTS)
        check_length("refusal", self.refusal, MAX_LINE)
        if self.phase not in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED):
            raise ProtocolError(f"a verdict cannot be {self.phase.value}")
        check_range("exit_code", self.exit_code, 0, 255)
        if (self.exit_code == 0) is not (self.phase is JobPhase.SUCCEEDED):
            raise ProtocolError(f"a verdict cannot be {self.phase.value} with exit code {self.exit_code}")
        check_range("decided_by", self.decided_by, 0, MAX_NODES)
        check_lines(self.last_lines)

    @property
    def is_of_guard(self) -> bool:
        """Whether it is of a node's guard, which knows only that its supervisor has ended."""
        first = self.first
        return first is not None and first.cause is Cause.AGENT and first.node == self.decided_by


@dataclass(frozen=True)
class ConcludeReply:
    """Whether the verdict was recorded. It is not where that of the node itself counts, or where processes of
    the job run."""

    recorded: bool


@dataclass(frozen=True)
class ConcludeRequest:
    """Record the verdict of the other nodes on one whose agent ended without a record, or which decided
    alone."""

    job: str
    verdict: Verdict

    STEP = "conclude"
    REPLY = ConcludeReply

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
