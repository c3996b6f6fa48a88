"""The refusal of a step because the store belongs to an agent of another version."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.agent.protocol.codec import (
    check_job_id,
    check_length,
    check_range,
)
from cloudddp.agent.protocol.phases import MAX_RUNNING


@dataclass(frozen=True)
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
