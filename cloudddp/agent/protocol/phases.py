"""What every module of the protocol may use of a job: its phases, its limits, where the agents of its nodes
listen, and that jobs of another version run. A sync imports no more of jobs than this."""

from __future__ import annotations

from enum import Enum

from cloudddp.agent.protocol.codec import check_job_id, check_length, check_range
from cloudddp.agent.protocol.frozen import frozen

MAX_NODES = 1 << 10
MAX_RANK = 1 << 16
MAX_RESTARTS = 1 << 16
MAX_TOKEN = 64  # characters that tell one cancel from another
LOG_MB, MIN_LOG_MB, MAX_LOG_MB = 1024, 1, 1 << 20  # MiB of one rank's log
MAX_RUNNING = 20  # jobs that a node reports as running; it runs one at a time


class JobPhase(Enum):
    """Where a job is in its life, on one node."""

    SETUP = "setup"  # its setup commands run
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # its supervisor is gone and did not record the end

    @property
    def ended(self) -> bool:
        return self not in (JobPhase.SETUP, JobPhase.STARTING, JobPhase.RUNNING)


MAX_INSTANCE_ID = 64


@frozen
class Peer:
    """A node of a job or of a sync, and where its agent listens. `id` is that of its instance, '' where it is
    not needed."""

    node: int
    address: str
    port: int
    id: str = ""

    def __post_init__(self) -> None:
        check_range("node", self.node, 0, MAX_NODES)
        check_length("address", self.address, 64)
        check_range("port", self.port, 1, (1 << 16) - 1)
        check_length("id", self.id, MAX_INSTANCE_ID)


@frozen
class VersionConflict:
    """A step was refused: `jobs` run under the agent version `store`, and the step's agent has version
    `agent`."""

    store: int
    agent: int
    jobs: tuple[str, ...]

    def __post_init__(self) -> None:
        check_range("store", self.store, 0, 1 << 31)
        check_range("agent", self.agent, 0, 1 << 31)
        check_length("jobs", self.jobs, MAX_RUNNING)
        for job in self.jobs:
            check_job_id("jobs", job)
