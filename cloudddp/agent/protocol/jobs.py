"""Jobs on a node: ranks, state; and `jobs`, which lists them."""

from __future__ import annotations

from dataclasses import dataclass
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
from cloudddp.agent.protocol.pace import MAX_STRAGGLERS, Straggler
from cloudddp.agent.protocol.phases import MAX_NODES, MAX_RANK, MAX_RESTARTS, JobPhase
from cloudddp.agent.protocol.stall import LeftStall
from cloudddp.agent.protocol.training import TrainingStatus
from cloudddp.agent.protocol.verdict import Verdict

MAX_LISTING = 8 << 20  # bytes of a list of jobs: 5,000 of 8 ranks
MAX_JOBS = 5_000  # of one node; the newest are listed
MAX_RANKS = 256  # of one node, as job.nproc_per_node allows
MAX_PID = 1 << 31
MAX_GRACE = 1e6  # seconds


MAX_WRAPPER = 40  # characters


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class JobsReply:
    """The jobs that a node has recorded, by id, which is by time."""

    jobs: tuple[JobState, ...]

    def __post_init__(self) -> None:
        check_length("jobs", self.jobs, MAX_JOBS)
        for job in self.jobs:  # any other id might sort after all of them, and be taken for the newest
            if not has_job_id_format(job.job):
                raise ProtocolError(f"not the id of a job: {job.job!r}")


@dataclass(frozen=True)
class JobsRequest:
    """List the jobs of this node."""

    STEP = "jobs"
    REPLY = JobsReply
