"""The project's files on a node: `apply` and `pack`."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.agent.protocol.codec import (
    MAX_COUNT,
    MAX_PATH,
    ProtocolError,
    check_job_id,
    check_length,
    check_project,
    check_range,
)
from cloudddp.agent.protocol.manifest import Entry, check_wire_manifest


@dataclass(frozen=True)
class ApplyReply:
    """How many files were written and deleted."""

    written: int
    deleted: int

    def __post_init__(self) -> None:
        check_range("written", self.written, 0, MAX_COUNT)
        check_range("deleted", self.deleted, 0, MAX_COUNT)


@dataclass(frozen=True)
class ApplyRequest:
    """Followed on stdin by a tar stream of `send` files. `manifest` (all files that the project then has) and `delete`
    are in wire form."""

    project: str
    manifest: dict[str, Entry]
    delete: tuple[str, ...]
    send: int

    STEP = "apply"
    REPLY = ApplyReply

    def __post_init__(self) -> None:
        check_project(self.project)
        check_range("send", self.send, 0, MAX_COUNT)
        check_wire_manifest(self.manifest)
        for path in self.delete:
            if max(path, default="\0") > "\xff":
                raise ProtocolError("a path is not bytes")


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
