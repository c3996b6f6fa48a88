"""The steps that exchange files, in the frames of transfer.py: `receive`, one node's part of a transfer of
project files, and `pack`, which sends files of a node to the laptop.

In `pack` the node sends one listing or several, and DONE. The laptop answers with WANTS. Then the files come,
what is left out and why, and DONE. While the node reads and has nothing to send, it sends ALIVE.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import field
from typing import Annotated, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.checkpoints import MAX_PARTS, Part
from cloudddp.agent.protocol.codec import (
    MAX_COUNT,
    MAX_REASON,
    OptionalJobId,
    OriginId,
    PathText,
    ProjectName,
    ShortText,
    Size,
    Text,
    at_most,
    encode,
    within,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import WirePath, path_to_wire
from cloudddp.agent.protocol.phases import Token
from cloudddp.agent.protocol.results import NewFilesRequest
from cloudddp.agent.protocol.transfer import Wants

# The folder of the project for what jobs wrote where a sync writes, and checkpoints that were moved away.
REPLACED = "replaced-by-sync"
MAX_KEPT = 20  # names of that which are reported


@frozen
class Kept:
    """How many files and folders that jobs wrote were in the way of a sync and are in REPLACED now, and some
    of their names, in wire form."""

    count: Annotated[int, within(1, MAX_COUNT)]
    names: Annotated[tuple[WirePath, ...], at_most(MAX_KEPT)]


@frozen
class ReceiveReply:
    """`version`: of the project, after this sync."""

    version: Size = 0
    replaced: Optional[Kept] = None


@frozen
class ReceiveEvent:
    """A line of what a node reports: what it lacks, and, with `lost`, why another node could not send that;
    that it has all files, and the port at which others get them (0: none); what the user should know; the
    end. Without any of these: that it is there, and whether it is `busy`, for example with its disk."""

    wants: Optional[Wants] = None
    lost: Text = ""
    complete: bool = False
    port: Annotated[int, within(0, (1 << 16) - 1)] = 0
    busy: bool = False
    note: Text = ""
    done: Optional[ReceiveReply] = None


@frozen
class ReceiveRequest:
    """Followed on stdin by frames: LISTING, to which the node reports what it lacks. Then these files and
    DONE, or FETCH with the Peer that has them. The node reports ReceiveEvents, one per line, serves other
    nodes at its `address` ('': none), and ends with CLOSE, or when stdin does. `put_back`: these are
    results, with these sharded checkpoints: nothing is deleted, and no sync has sent them.

    `origin` is the id of the laptop's project, "" for none. Files that another project has sent are compared
    by their contents, not by size and time. `version`: that of the project when it was compared, 0 for any;
    the sync is refused where it has another one. `job`: the one whose launch this sync is part of, '' for
    none; nobody else may change the files until it has started."""

    project: ProjectName
    secret: Token = field(default_factory=functools.partial(secrets.token_hex, 32))
    address: ShortText = ""
    origin: OriginId = ""
    version: Size = 0
    job: OptionalJobId = ""
    put_back: Optional[Annotated[tuple[Part, ...], at_most(MAX_PARTS)]] = None

    STEP = "receive"


MAX_LEFT_OUT = 1000  # that are named
MAX_LISTED = 1 << 20  # characters in one listing, of paths and targets of links, with LISTED for each file
LISTED = 100
MAX_LISTING_TEXT = 8 << 20  # bytes of its JSON: up to 6 for a character, and 150 for a file besides its path


@frozen
class PackRequest:
    """Files and folders of the project, or with `job` of that job's own folder (its logs), by their paths
    there. `selection`: of the whole project, what jobs wrote: what was not pulled yet, up to its `limit`, and
    what was written since its `job` began. With `results_of`, a job, the listings say which files other jobs
    wrote, without those of them that were pulled."""

    project: ProjectName
    paths: tuple[PathText, ...]
    job: OptionalJobId = ""
    all: bool = False  # also files behind links that no job wrote
    selection: Optional[NewFilesRequest] = None
    results_of: OptionalJobId = ""

    STEP = "pack"


@frozen
class SkippedEntry:
    """A path that was not copied, and why, both in wire form. `counts`: a result may be missing because of it
    (which a pipe is not). Without a name: there are more. Without a reason: it does not exist."""

    name: PathText
    reason: Annotated[str, at_most(4 * MAX_REASON)]
    counts: bool = True


def left_out(name: str, reason: str, *, counts: bool = True) -> bytes:
    """Return the frame for a path as the operating system has it."""
    one = SkippedEntry(path_to_wire(name), path_to_wire(reason), counts)
    return transfer.frame(transfer.UNSEALED, transfer.LEFT_OUT, encode(one))
