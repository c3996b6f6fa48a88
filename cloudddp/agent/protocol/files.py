"""The files of a node that go to the laptop: `pack`."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.agent.protocol.codec import MAX_PATH, check_job_id, check_length, check_project


@dataclass(frozen=True)
class PackRequest:
    """Files and folders of the project, or with `job` of that job's own folder (its logs), by their paths there. The answer
    is a tar stream; stderr names what is missing or was left out."""

    project: str
    paths: tuple[str, ...]
    job: str = ""

    STEP = "pack"

    def __post_init__(self) -> None:
        check_project(self.project)
        if self.job:
            check_job_id("job", self.job)
        for path in self.paths:
            check_length("a path", path, MAX_PATH)
