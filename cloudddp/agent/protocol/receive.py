"""`receive`: one node's part of a transfer of project files, and what it reports meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from cloudddp.agent.protocol.codec import (
    MAX_COUNT,
    MAX_SIZE,
    MAX_TEXT,
    check_job_id,
    check_length,
    check_origin,
    check_project,
    check_range,
)
from cloudddp.agent.protocol.manifest import MAX_FILES, check_folder
from cloudddp.agent.protocol.peer import Peer
from cloudddp.agent.protocol.phases import MAX_NODES, MAX_TOKEN
from cloudddp.agent.protocol.transfer import Wants

REPLACED = "replaced-by-sync"  # the folder of the project for what jobs wrote where a sync writes
MAX_KEPT = 20  # names of that which are reported
# Stages of a node: it waits for the listing, has it, has compared it with what is there, waits for its disk.
WAITING, LISTED, COMPARED, WRITING = range(4)


@dataclass(frozen=True)
class Kept:
    """How many files and folders that jobs wrote were in the way of a sync and are in REPLACED now, and some
    of their names, in wire form."""

    count: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_range("count", self.count, 1, MAX_COUNT)
        check_length("names", self.names, MAX_KEPT)
        for name in self.names:
            check_folder(name)


@dataclass(frozen=True)
class ReceiveReply:
    """How many files were written and deleted; the contents of `kept` ones were there already. `version`: of
    the project, after this sync."""

    written: int = 0
    deleted: int = 0
    kept: int = 0
    received: int = 0  # bytes in frames
    version: int = 0
    replaced: Optional[Kept] = None

    def __post_init__(self) -> None:
        for name in ("written", "deleted", "kept"):
            check_range(name, getattr(self, name), 0, MAX_COUNT)
        check_range("received", self.received, 0, MAX_SIZE)
        check_range("version", self.version, 0, MAX_SIZE)


@dataclass(frozen=True)
class ReceiveEvent:
    """A line of what a node reports meanwhile: the files that it lacks; its stage, what it has received, and
    what it has hashed or written besides; the files whose beginning on the node was wrong, to send them as a
    whole; why it needs the files from the laptop; what the user should know; the end."""

    wants: Optional[Wants] = None
    stage: int = WAITING
    received: int = 0  # bytes
    worked: int = 0  # bytes
    again: tuple[int, ...] = ()
    direct: str = ""
    note: str = ""
    done: Optional[ReceiveReply] = None

    def __post_init__(self) -> None:
        check_range("stage", self.stage, WAITING, WRITING)
        check_range("received", self.received, 0, MAX_SIZE)
        check_range("worked", self.worked, 0, MAX_SIZE)
        check_length("again", self.again, MAX_FILES)
        check_length("direct", self.direct, MAX_TEXT)
        check_length("note", self.note, MAX_TEXT)


@dataclass(frozen=True)
class ReceiveRequest:
    """Followed on stdin by frames. The node `first` gets those of the transfer there, and serves the others,
    `nodes` in all. Any other `node` connects to the first one; SOURCE on its stdin says that the files come
    from there, too. The node reports ReceiveEvents, one per line, and ends with CLOSE, or when stdin does.
    `adds`: nothing is deleted, and the files are not recorded as those of a sync.

    `origin` is the id of the laptop's project, "" for none. Files that another project has sent are compared
    by their contents, not by size and time. `version`: that of the project when it was compared, 0 for any;
    the sync is refused where it has another one. `job`: the one whose launch this sync is part of, '' for
    none; nobody else may change the files until it has started."""

    project: str
    secret: str
    node: int
    first: Peer
    nodes: int
    origin: str = ""
    version: int = 0
    job: str = ""
    adds: bool = False

    STEP = "receive"

    def __post_init__(self) -> None:
        check_project(self.project)
        check_length("secret", self.secret, MAX_TOKEN)
        check_origin(self.origin)
        check_range("node", self.node, 0, MAX_NODES)
        check_range("nodes", self.nodes, 1, MAX_NODES)
        check_range("version", self.version, 0, MAX_SIZE)
        if self.job:
            check_job_id("job", self.job)
