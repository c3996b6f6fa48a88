"""`follow`: the logs and states of a job as frames (transfer.py), on stdout; `readings`: states and readings.

LOG has rank and offset in its head, and a piece of that rank's log as its body. STATE (the job's state, when
it has changed) and READING (what the node has measured) have a body of JSON. HEARTBEAT is sent at an
interval: without it the node is down, even if the job prints nothing. STREAM_END is the last frame.
"""

from __future__ import annotations

import struct
from dataclasses import field
from typing import Annotated, Optional, Union

from cloudddp.agent.protocol import SETUP_RANK, transfer
from cloudddp.agent.protocol.codec import Count, JobId, ProtocolError, at_most, encode_utf8, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.protocol.phases import MAX_RANK
from cloudddp.agent.protocol.readings import Reading
from cloudddp.agent.protocol.transfer import UNSEALED

MAX_STATE = 1 << 20  # bytes of one state: 256 ranks take 50 kB
MAX_PIECE = 1 << 16  # bytes of log in one frame

LogRank = Annotated[int, within(SETUP_RANK, MAX_RANK)]

RECORDS: dict[int, type[Union[JobState, Reading]]] = {transfer.STATE: JobState, transfer.READING: Reading}
# The longest body of each kind.
LIMITS = {
    transfer.LOG: MAX_PIECE,
    **dict.fromkeys(RECORDS, MAX_STATE),
    transfer.HEARTBEAT: 0,
    transfer.STREAM_END: 0,
}
_LOG = struct.Struct(">iQ")  # rank, offset


@frozen
class FollowRequest:
    """`offsets` is where to continue each rank's log, in bytes; a rank that is not named starts at 0. With
    `wait` the stream goes on until the job has ended, with a heartbeat every `heartbeat` seconds.

    `ranks`: send only their logs; all if empty. A log that exists and is not in `offsets` begins with what
    was written in the last `since` seconds, and with its last `tail` lines; an empty piece reports where that
    is, before the first state. `setup`: send also the output of the setup commands, unless `ranks` are named.
    """

    job: JobId
    wait: bool
    heartbeat: Annotated[float, within(0, 3600.0)]
    offsets: dict[LogRank, Count] = field(default_factory=dict)
    ranks: Annotated[tuple[LogRank, ...], at_most(MAX_RANKS)] = ()
    since: Optional[Annotated[float, within(0, 1e9)]] = None
    tail: Optional[Annotated[int, within(0, 1 << 24)]] = None
    setup: bool = False

    STEP = "follow"


@frozen
class Log:
    """A piece of one rank's log, at its offset in the file. What was between this piece and the one before no
    longer exists: the log was longer than its limit. An empty piece reports where a log begins. LAUNCHER_RANK
    is the launcher's own output, SETUP_RANK that of the setup commands."""

    rank: LogRank
    offset: Count
    data: Annotated[bytes, at_most(MAX_PIECE)]

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@frozen
class Heartbeat:
    """The node and the connection work."""


@frozen
class End:
    """The job has ended on this node (or `wait` was not requested), and every byte of its logs was sent."""


Frame = Union[Log, JobState, Reading, Heartbeat, End]


def encode_frame(frame: Frame) -> bytes:
    if isinstance(frame, Log):
        return transfer.frame(UNSEALED, transfer.LOG, _LOG.pack(frame.rank, frame.offset), frame.data)
    for kind, record in RECORDS.items():
        if isinstance(frame, record):
            return transfer.frame(UNSEALED, kind, body=encode_utf8(frame))
    kind = transfer.HEARTBEAT if isinstance(frame, Heartbeat) else transfer.STREAM_END
    return transfer.frame(UNSEALED, kind)


def read_log(found: transfer.Frame) -> Log:
    """Raises ProtocolError."""
    if len(found.head) != _LOG.size:
        raise ProtocolError("a log frame has another head")
    rank, offset = _LOG.unpack(found.head)
    return Log(rank, offset, found.body)
