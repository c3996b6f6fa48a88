"""`pack`: files of a node that go to the laptop, as frames of transfer.py.

The node sends one listing or several, and DONE. The laptop answers with WANTS, or with CLOSE where it lacks
nothing. Then the files come, what is left out and why, and DONE. While the node reads and has nothing to
send, it says how far it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    MAX_REASON,
    MAX_SIZE,
    ProtocolError,
    check_job_id,
    check_length,
    check_project,
    check_range,
    encode,
)
from cloudddp.agent.protocol.manifest import path_to_wire

MAX_LEFT_OUT = 1000  # that are named
MAX_LISTED = 50_000  # files in one listing
MAX_NAMES = 4 << 20  # characters of their paths, and of the targets of links
MAX_TEXT = 32 << 20  # bytes of the text of one listing: a file has up to 150 besides its path
_WORK = struct.Struct(">QQ")  # files, bytes


@dataclass(frozen=True)
class Selection:
    """Of the whole project, what jobs wrote: what was not pulled yet, up to `limit` bytes, and what was
    written since `job` began. `scratch` are paths that are left out; `present` as in
    results.NewFilesRequest."""

    job: str
    scratch: tuple[str, ...]
    limit: int
    present: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("limit", self.limit, 0, MAX_SIZE)


@dataclass(frozen=True)
class PackRequest:
    """Files and folders of the project, or with `job` of that job's own folder (its logs), by their paths
    there. stderr names what is missing."""

    project: str
    paths: tuple[str, ...]
    job: str = ""
    all: bool = False  # also files behind links that no job wrote
    selection: Optional[Selection] = None

    STEP = "pack"

    def __post_init__(self) -> None:
        check_project(self.project)
        if self.job:
            check_job_id("job", self.job)
        for path in self.paths:
            check_length("a path", path, MAX_PATH)


@dataclass(frozen=True)
class LeftOut:
    """A path that was not copied, and why, both in wire form. `counts`: a result may be missing because of it
    (which a pipe is not). Without a name: there are more."""

    name: str
    reason: str
    counts: bool = True

    def __post_init__(self) -> None:
        check_length("a path", self.name, MAX_PATH)
        check_length("a reason", self.reason, 4 * MAX_REASON)


def left_out(name: str, reason: str, *, counts: bool = True) -> bytes:
    """Return the frame for a path as the operating system has it."""
    one = LeftOut(path_to_wire(name), path_to_wire(reason), counts)
    return transfer.frame(transfer.UNSEALED, transfer.LEFT_OUT, encode(one))


class Work(NamedTuple):
    """What a node has done so far without sending it: files that it has looked at, bytes that it has
    hashed."""

    files: int
    size: int


def working(work: Work) -> bytes:
    """Return the frame that says what a node does while it has nothing to send."""
    return transfer.frame(transfer.UNSEALED, transfer.ALIVE, _WORK.pack(*work))


def read_work(found: transfer.Frame) -> Work:
    """Raises ProtocolError."""
    if len(found.head) != _WORK.size:
        raise ProtocolError("a report of work has another length")
    return Work(*_WORK.unpack(found.head))
