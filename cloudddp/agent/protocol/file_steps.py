"""The steps that exchange files, in the frames of transfer.py: `receive`, one node's part of a transfer of
project files, and `pack`, which sends files of a node to the laptop.

In `pack` the node sends one listing or several, and DONE. The laptop answers with WANTS, or with CLOSE where
it lacks nothing. Then the files come, what is left out and why, and DONE. While the node reads and has
nothing to send, it sends ALIVE.
"""

from __future__ import annotations

from typing import Annotated, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import (
    MAX_COUNT,
    MAX_REASON,
    Count,
    JobId,
    OptionalJobId,
    OriginId,
    PathText,
    ProjectName,
    Size,
    Text,
    at_most,
    encode,
    within,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import MAX_FILES, WirePath, path_to_wire
from cloudddp.agent.protocol.phases import MAX_NODES, NodeRank, Peer, Token
from cloudddp.agent.protocol.transfer import Wants

# The folder of the project for what jobs wrote where a sync writes, and checkpoints that were moved away.
REPLACED = "replaced-by-sync"
MAX_KEPT = 20  # names of that which are reported
# Stages of a node: it waits for the listing, has it, has compared it with what is there, waits for its disk.
WAITING, LISTED, COMPARED, WRITING = range(4)


@frozen
class Kept:
    """How many files and folders that jobs wrote were in the way of a sync and are in REPLACED now, and some
    of their names, in wire form."""

    count: Annotated[int, within(1, MAX_COUNT)]
    names: Annotated[tuple[WirePath, ...], at_most(MAX_KEPT)]


@frozen
class ReceiveReply:
    """How many files were written and deleted; the contents of `kept` ones were there already. `version`: of
    the project, after this sync."""

    written: Count = 0
    deleted: Count = 0
    kept: Count = 0
    received: Size = 0  # bytes in frames
    version: Size = 0
    replaced: Optional[Kept] = None


@frozen
class ReceiveEvent:
    """A line of what a node reports meanwhile: the files that it lacks; its stage, what it has received, and
    what it has hashed or written besides; the files whose beginning on the node was wrong, to send them as a
    whole; why it needs the files from the laptop; what the user should know; the end."""

    wants: Optional[Wants] = None
    stage: Annotated[int, within(WAITING, WRITING)] = WAITING
    received: Size = 0  # bytes
    worked: Size = 0  # bytes
    again: Annotated[tuple[int, ...], at_most(MAX_FILES)] = ()
    direct: Text = ""
    note: Text = ""
    done: Optional[ReceiveReply] = None


@frozen
class ReceiveRequest:
    """Followed on stdin by frames. The node `first` gets those of the transfer there, and serves the others,
    `nodes` in all. Any other `node` connects to the first one; SOURCE on its stdin says that the files come
    from there, too. The node reports ReceiveEvents, one per line, and ends with CLOSE, or when stdin does.
    `adds`: nothing is deleted, and the files are not recorded as those of a sync.

    `origin` is the id of the laptop's project, "" for none. Files that another project has sent are compared
    by their contents, not by size and time. `version`: that of the project when it was compared, 0 for any;
    the sync is refused where it has another one. `job`: the one whose launch this sync is part of, '' for
    none; nobody else may change the files until it has started."""

    project: ProjectName
    secret: Token
    node: NodeRank
    first: Peer
    nodes: Annotated[int, within(1, MAX_NODES)]
    origin: OriginId = ""
    version: Size = 0
    job: OptionalJobId = ""
    adds: bool = False

    STEP = "receive"


MAX_LEFT_OUT = 1000  # that are named
MAX_LISTED = 10_000  # files in one listing
MAX_NAMES = 1 << 20  # characters of their paths, and of the targets of links
MAX_LEFT_OUT_TEXT = 8 << 20  # bytes of the text of one listing: a file has up to 150 besides its path


@frozen
class Selection:
    """Of the whole project, what jobs wrote: what was not pulled yet, up to `limit` bytes, and what was
    written since `job` began. `scratch` are paths that are left out; `present` as in
    results.NewFilesRequest."""

    job: JobId
    scratch: tuple[str, ...]
    limit: Size
    present: tuple[str, ...] = ()


@frozen
class PackRequest:
    """Files and folders of the project, or with `job` of that job's own folder (its logs), by their paths
    there. stderr names what is missing. With `results_of`, a job, the listing says which files other jobs
    wrote, without those of them that were pulled."""

    project: ProjectName
    paths: tuple[PathText, ...]
    job: OptionalJobId = ""
    all: bool = False  # also files behind links that no job wrote
    selection: Optional[Selection] = None
    results_of: OptionalJobId = ""

    STEP = "pack"


@frozen
class LeftOut:
    """A path that was not copied, and why, both in wire form. `counts`: a result may be missing because of it
    (which a pipe is not). Without a name: there are more."""

    name: PathText
    reason: Annotated[str, at_most(4 * MAX_REASON)]
    counts: bool = True


def left_out(name: str, reason: str, *, counts: bool = True) -> bytes:
    """Return the frame for a path as the operating system has it."""
    one = LeftOut(path_to_wire(name), path_to_wire(reason), counts)
    return transfer.frame(transfer.UNSEALED, transfer.LEFT_OUT, encode(one))
