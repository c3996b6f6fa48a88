"""Jobs on a node: ranks, state, and the verdict; `jobs`, which lists them, and `kill`, which cancels one.

The verdict is how a job ended on all its nodes, and what failed first. Every node keeps the same one;
`conclude` gives it to a node that could not take part.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import (
    MAX_TEXT,
    MAX_TIME,
    ProtocolError,
    check_job_id,
    check_length,
    check_range,
    has_job_id_format,
)
from cloudddp.agent.protocol.copies import Copied
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import MAX_NODES, MAX_RANK, MAX_RESTARTS, MAX_TOKEN, JobPhase
from cloudddp.agent.protocol.progress import MAX_STRAGGLERS, LeftStall, Straggler, TrainingStatus

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
    EXIT = "exit"  # the process of a rank crashed after its script had ended
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


@frozen
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


@frozen
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


@frozen
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


@frozen
class ConcludeReply:
    """Whether the verdict was recorded. It is not where that of the node itself counts, or where processes of
    the job run."""

    recorded: bool


@frozen
class ConcludeRequest:
    """Record the verdict of the other nodes on one whose agent ended without a record, or which decided
    alone."""

    job: str
    verdict: Verdict

    STEP = "conclude"
    REPLY = ConcludeReply

    def __post_init__(self) -> None:
        check_job_id("job", self.job)


MAX_LISTING = 8 << 20  # bytes of a list of jobs: 5,000 of 8 ranks
MAX_JOBS = 5_000  # of one node; the newest are listed
MAX_RANKS = 256  # of one node, as job.nproc_per_node allows
MAX_PID = 1 << 31
MAX_GRACE = 1e6  # seconds


MAX_WRAPPER = 40  # characters


@frozen
class RankRecord:
    """One rank on its node. Times are seconds since the epoch by that node's clock. `ended` and `exit_code`
    are None while it runs; `signal` is the signal that ended it, or None. `at` is the end by the node's
    monotonic clock, which nobody can set. `asked`: it had been asked to stop before. `error` is what
    torch.distributed.elastic recorded. `wrapper` names the process that records the end (kernel.name)."""

    rank: int
    exit_code: Optional[int]
    ended: Optional[float]
    signal: Optional[int] = None
    pid: Optional[int] = None
    at: Optional[float] = None
    asked: bool = False
    error: str = ""
    wrapper: str = ""

    def __post_init__(self) -> None:
        check_range("at", self.at, 0, MAX_TIME)
        check_length("error", self.error, MAX_TEXT)
        check_length("wrapper", self.wrapper, MAX_WRAPPER)
        check_range("rank", self.rank, 0, MAX_RANK)
        check_range("exit_code", self.exit_code, 0, 255)
        check_range("ended", self.ended, 0, MAX_TIME)
        check_range("signal", self.signal, 1, 64)
        check_range("pid", self.pid, 1, MAX_PID)
        if (self.exit_code is None) != (self.ended is None):
            raise ProtocolError("a rank has an exit code without an end, or an end without an exit code")


@frozen
class StateFile:
    """What a job's supervisor records. `state` is named as agent version 1 wrote it."""

    job: str
    node: int
    state: JobPhase
    started: Optional[float] = None
    ended: Optional[float] = None
    exit_code: Optional[int] = None
    error: str = ""
    pid: Optional[int] = None  # of the supervisor, and when that started
    born: str = ""
    script: str = ""
    expected: Optional[int] = None
    max_restarts: int = 0
    restarts: int = 0
    guard: Optional[int] = None  # the supervisor's parent, which records the end of one that was killed
    guard_born: str = ""
    resumed_from: str = ""
    boot: str = ""  # of the machine (kernel.boot)

    def __post_init__(self) -> None:
        check_range("node", self.node, 0, MAX_NODES)
        check_range("started", self.started, 0, MAX_TIME)
        check_range("ended", self.ended, 0, MAX_TIME)
        check_range("exit_code", self.exit_code, 0, 255)
        check_range("expected", self.expected, 0, MAX_RANKS)
        check_range("max_restarts", self.max_restarts, 0, MAX_RESTARTS)
        check_range("restarts", self.restarts, 0, MAX_RESTARTS)


@frozen
class JobState:
    """The state of a job on one node. `expected` is how many ranks run there once all have started;
    `stopping` is True while it is being stopped; `cancelled` is when the user first asked for that; `error`
    is why its processes could not be started. `verdict` is that of all nodes, once they have agreed on it.
    `restarts`: how often the whole job was started again. `poweroff`: seconds after the end of the job at
    which the node powers off; None: it does not. `ends`: when it will, once the job has ended.
    `resumed_from`: the job that it continues, '' for none. `stragglers`, of all nodes: ranks that are slow,
    or were. `stall`: the last one that was left alone, None for none. `copied`: what the node has copied to
    S3; None where it was not asked to, or has not begun. `setup`: it is in its setup, or has ended there: no
    rank was started. `rebooted`: when the machine started again, where the job ended because it was
    rebooted."""

    job: str
    phase: JobPhase
    node: Optional[int] = None
    exit_code: Optional[int] = None
    started: Optional[float] = None
    ended: Optional[float] = None
    error: str = ""
    script: str = ""
    expected: Optional[int] = None
    max_restarts: int = 0
    stopping: bool = False
    ranks: tuple[RankRecord, ...] = ()
    training: Optional[TrainingStatus] = None
    cancelled: Optional[float] = None
    verdict: Optional[Verdict] = None
    restarts: int = 0
    poweroff: Optional[float] = None
    ends: Optional[float] = None
    resumed_from: str = ""
    stragglers: tuple[Straggler, ...] = ()
    stall: Optional[LeftStall] = None
    copied: Optional[Copied] = None
    setup: bool = False
    rebooted: Optional[float] = None

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("rebooted", self.rebooted, 0, MAX_TIME)
        if self.resumed_from:
            check_job_id("resumed_from", self.resumed_from)
        check_range("cancelled", self.cancelled, 0, MAX_TIME)
        check_range("node", self.node, 0, MAX_NODES)
        check_range("exit_code", self.exit_code, 0, 255)
        check_range("started", self.started, 0, MAX_TIME)
        check_range("ended", self.ended, 0, MAX_TIME)
        check_range("poweroff", self.poweroff, 0, MAX_TIME)
        check_range("ends", self.ends, 0, MAX_TIME)
        check_range("expected", self.expected, 0, MAX_RANKS)
        check_range("max_restarts", self.max_restarts, 0, MAX_RESTARTS)
        check_range("restarts", self.restarts, 0, MAX_RESTARTS)
        check_length("error", self.error, MAX_TEXT)
        check_length("script", self.script, MAX_TEXT)
        check_length("ranks", self.ranks, MAX_RANKS)
        check_length("stragglers", self.stragglers, MAX_STRAGGLERS)


@frozen
class JobsReply:
    """The jobs that a node has recorded, by id, which is by time."""

    jobs: tuple[JobState, ...]

    def __post_init__(self) -> None:
        check_length("jobs", self.jobs, MAX_JOBS)
        for job in self.jobs:  # any other id might sort after all of them, and be taken for the newest
            if not has_job_id_format(job.job):
                raise ProtocolError(f"not the id of a job: {job.job!r}")


@frozen
class JobsRequest:
    """List the jobs of this node."""

    STEP = "jobs"
    REPLY = JobsReply


@frozen
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


@frozen
class KillRequest:
    """Cancel a job: end every process of it on this node, SIGTERM, and SIGKILL after `grace` seconds. The
    supervisor of the node tells the others. `token` is the same on all nodes, and no other cancel has it.
    `forget`: remove all records of the job, too, once it has ended."""

    job: str
    grace: float
    token: str
    forget: bool = False

    STEP = "kill"
    REPLY = KillReply

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("grace", self.grace, 0, MAX_GRACE)
        check_length("token", self.token, MAX_TOKEN)
