"""Jobs on a node: ranks, state, and the verdict; `jobs`, which lists them, and `kill`, which cancels one.

The verdict is how a job ended on all its nodes, and what failed first. Every node keeps the same one;
`conclude` gives it to a node that could not take part.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import (
    ExitStatus,
    JobId,
    OptionalJobId,
    ProtocolError,
    SignalNumber,
    Text,
    Time,
    at_most,
    has_job_id_format,
    within,
)
from cloudddp.agent.protocol.copies import Copied
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.phases import Done, JobPhase, NodeRank, Rank, Restarts, Token
from cloudddp.agent.protocol.progress import KnownStragglers, ToleratedStall, TrainingStatus

MAX_LINES = 50  # of the rank that failed first
MAX_LINE = 1000  # characters of each
MAX_AGO = 1e8  # seconds

Ago = Annotated[float, within(0, MAX_AGO)]


Line = Annotated[str, at_most(MAX_LINE)]
LastLines = Annotated[tuple[Line, ...], at_most(MAX_LINES)]


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

    node: NodeRank
    rank: Rank
    ago: Ago
    others: Rank = 0
    likely: bool = False


@frozen
class Failure:
    """What failed on `node`. `rank`, `exit_code` and `signal` are None where no rank's own end is the cause.
    `detail` is text that a program wrote; `peer` is the other node of a connection that failed; `exited` a
    rank that had left."""

    node: NodeRank
    cause: Cause
    rank: Optional[Rank] = None
    exit_code: Optional[ExitStatus] = None
    signal: Optional[SignalNumber] = None
    detail: Text = ""
    peer: Optional[NodeRank] = None
    exited: Optional[Exited] = None


@frozen
class Verdict:
    """How a job ended on all its nodes: the same on each of them. `first` is what failed first, with the
    `last_lines` of its rank or launcher. `decided_by` is the node that decided: the first one that was left.
    `restarts` is how often the job was started again, and `refusal` why not once more, '' where it was not
    asked for. `at` is when it was given, by the clock of the node that decided: the end of the job, also for
    a node that learns of it later."""

    phase: JobPhase
    exit_code: ExitStatus
    decided_by: NodeRank
    first: Optional[Failure] = None
    last_lines: LastLines = ()
    restarts: Restarts = 0
    refusal: Line = ""
    at: Optional[Time] = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.phase not in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED):
            raise ProtocolError(f"a verdict cannot be {self.phase.value}")
        if (self.exit_code == 0) is not (self.phase is JobPhase.SUCCEEDED):
            raise ProtocolError(f"a verdict cannot be {self.phase.value} with exit code {self.exit_code}")

    @property
    def is_of_guard(self) -> bool:
        """Whether it is of a node's guard, which knows only that its supervisor has ended."""
        first = self.first
        return first is not None and first.cause is Cause.AGENT and first.node == self.decided_by


@frozen
class ConcludeRequest:
    """Record the verdict of the other nodes on one whose agent ended without a record, or which decided
    alone; not where that of the node itself counts, or where processes of the job run."""

    job: JobId
    verdict: Verdict

    STEP = "conclude"
    REPLY = Done


MAX_LISTING = 8 << 20  # bytes of a list of jobs: 5,000 of 8 ranks
MAX_JOBS = 5_000  # of one node; the newest are listed
MAX_RANKS = 256  # of one node, as job.nproc_per_node allows
MAX_PID = 1 << 31
MAX_GRACE = 1e6  # seconds


RankCount = Annotated[int, within(0, MAX_RANKS)]


@frozen
class RankRecord:
    """One rank on its node. Times are seconds since the epoch by that node's clock. `ended` and `exit_code`
    are None while it runs; `signal` is the signal that ended it, or None. `at` is the end by the node's
    monotonic clock, which nobody can set. `asked`: it had been asked to stop before. `error` is what
    torch.distributed.elastic recorded. `wrapper` names the process that records the end (kernel.name)."""

    rank: Rank
    exit_code: Optional[ExitStatus]
    ended: Optional[Time]
    signal: Optional[SignalNumber] = None
    pid: Optional[Annotated[int, within(1, MAX_PID)]] = None
    at: Optional[Time] = None
    asked: bool = False
    error: Text = ""
    wrapper: Annotated[str, at_most(40)] = ""

    def __post_init__(self) -> None:
        if (self.exit_code is None) != (self.ended is None):
            raise ProtocolError("a rank has an exit code without an end, or an end without an exit code")


@frozen
class StateFile:
    """What a job's supervisor records. `state` is named as agent version 1 wrote it."""

    job: str
    node: NodeRank
    state: JobPhase
    started: Optional[Time] = None
    ended: Optional[Time] = None
    exit_code: Optional[ExitStatus] = None
    error: str = ""
    pid: Optional[int] = None  # of the supervisor, and when that started
    born: str = ""
    script: str = ""
    expected: Optional[RankCount] = None
    max_restarts: Restarts = 0
    restarts: Restarts = 0
    guard: Optional[int] = None  # the supervisor's parent, which records the end of one that was killed
    guard_born: str = ""
    resumed_from: str = ""
    boot: str = ""  # of the machine (kernel.boot)
    reached: dict[str, float] = field(
        default_factory=dict
    )  # parts of the start -> when, by the monotonic clock


@frozen
class JobState:
    """The state of a job on one node. `expected` is how many ranks run there once all have started;
    `stopping` is True while it is being stopped; `cancelled` is when the user first asked for that; `error`
    is why its processes could not be started. `verdict` is that of all nodes, once they have agreed on it.
    `restarts`: how often the whole job was started again. `poweroff`: seconds without a use after the job
    until the node ends, as it was started; None: it does not. `grace`: the same by the node's plan, once the
    job has ended; `unused`: for how many it has been unused. `resumed_from`: the job that it continues, ''
    for none. `stragglers`, of all nodes: ranks that are slow, or were. `stall`: the last one that was left
    alone, None for none. `copied`: what the node has copied to S3; None where it was not asked to, or has not
    begun. `setup`: it is in its setup, or has ended there: no rank was started. `rebooted`: when the machine
    started again, where the job ended because it was rebooted."""

    job: JobId
    phase: JobPhase
    node: Optional[NodeRank] = None
    exit_code: Optional[ExitStatus] = None
    started: Optional[Time] = None
    ended: Optional[Time] = None
    error: Text = ""
    script: Text = ""
    expected: Optional[RankCount] = None
    max_restarts: Restarts = 0
    stopping: bool = False
    ranks: Annotated[tuple[RankRecord, ...], at_most(MAX_RANKS)] = ()
    training: Optional[TrainingStatus] = None
    cancelled: Optional[Time] = None
    verdict: Optional[Verdict] = None
    restarts: Restarts = 0
    poweroff: Optional[Time] = None
    grace: Optional[Time] = None
    unused: Time = 0.0
    resumed_from: OptionalJobId = ""
    stragglers: KnownStragglers = ()
    stall: Optional[ToleratedStall] = None
    copied: Optional[Copied] = None
    setup: bool = False
    rebooted: Optional[Time] = None


@frozen
class JobsReply:
    """The jobs that a node has recorded, by id, which is by time."""

    jobs: Annotated[tuple[JobState, ...], at_most(MAX_JOBS)]

    def __post_init__(self) -> None:
        for job in self.jobs:  # any other id might sort after all of them, and be taken for the newest
            if not has_job_id_format(job.job):
                raise ProtocolError(f"not the id of a job: {job.job!r}")


@frozen
class JobsRequest:
    """List the jobs of this node."""

    STEP = "jobs"
    REPLY = JobsReply
    LIMIT = MAX_LISTING


@frozen
class KillReply:
    """How many processes were ended, how many of them were `ranks`, and how many survived. `phase` is None
    for a job that the node does not have; it will refuse to start it. `started`: a rank was started there."""

    ended: Annotated[int, within(0, MAX_PID)]
    left: Annotated[int, within(0, MAX_PID)]
    ranks: RankCount = 0
    phase: Optional[JobPhase] = None
    training: Optional[TrainingStatus] = None
    started: bool = True


@frozen
class KillRequest:
    """Cancel a job: end every process of it on this node, SIGTERM, and SIGKILL after `grace` seconds. The
    supervisor of the node tells the others. `token` is the same on all nodes, and no other cancel has it.
    `forget`: remove all records of the job, too, once it has ended."""

    job: JobId
    grace: Annotated[float, within(0, MAX_GRACE)]
    token: Token
    forget: bool = False

    STEP = "kill"
    REPLY = KillReply
