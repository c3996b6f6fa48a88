"""What every module of the protocol may use of a job: its phases, its limits, where the agents of its nodes
listen, and that jobs of another version run. A sync imports no more of jobs than this."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from cloudddp.agent.protocol.codec import JobId, Port, ShortText, at_most, within
from cloudddp.agent.protocol.frozen import frozen

MAX_NODES = 1 << 10
MAX_RANK = 1 << 16
MAX_RESTARTS = 1 << 16
MAX_TOKEN = 64  # characters that tell one cancel from another
LOG_MB, MIN_LOG_MB, MAX_LOG_MB = 1024, 1, 1 << 20  # MiB of one rank's log
MAX_RUNNING = 20  # jobs that a node reports as running; it runs one at a time

NodeRank = Annotated[int, within(0, MAX_NODES)]
Rank = Annotated[int, within(0, MAX_RANK)]
Restarts = Annotated[int, within(0, MAX_RESTARTS)]
Token = Annotated[str, at_most(MAX_TOKEN)]
LogMiB = Annotated[int, within(MIN_LOG_MB, MAX_LOG_MB)]


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


@frozen
class Done:
    """The reply of a step that has nothing to report."""


MAX_INSTANCE_ID = 64


@frozen
class Peer:
    """A node of a job or of a sync, and where its agent listens. `id` is that of its instance, '' where it is
    not needed."""

    node: NodeRank
    address: ShortText
    port: Port
    id: Annotated[str, at_most(MAX_INSTANCE_ID)] = ""


@frozen
class VersionConflict:
    """A step was refused: `jobs` run under the agent version `store`, and the step's agent has version
    `agent`."""

    store: Annotated[int, within(0, 1 << 31)]
    agent: Annotated[int, within(0, 1 << 31)]
    jobs: Annotated[tuple[JobId, ...], at_most(MAX_RUNNING)]
