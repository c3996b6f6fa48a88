r"""`follow`: the logs and states of a job as a stream of frames, on stdout; `readings`: states and readings.

log RANK OFFSET LENGTH\n and LENGTH bytes of that rank's log
state JSON\n             the job's state, when it has changed
reading JSON\n           what the node has measured
heartbeat\n              sent at an interval: without it the node is down, even if the job prints nothing
end\n                    the last frame: the job has ended and all of its logs were sent
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Optional, Union

from cloudddp.agent.protocol import SETUP_RANK
from cloudddp.agent.protocol.codec import MAX_COUNT, Count, JobId, ProtocolError, at_most, encode_utf8, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.protocol.phases import MAX_RANK
from cloudddp.agent.protocol.readings import Reading

MAX_STATE = 1 << 20  # bytes of one state: 256 ranks take 50 kB
MAX_PIECE = 1 << 16  # bytes of log in one frame
MAX_INTERVAL = 3600.0  # seconds
MAX_AGE = 1e9  # seconds
MAX_TAIL = 1 << 24  # lines

LogRank = Annotated[int, within(SETUP_RANK, MAX_RANK)]

LOG, HEARTBEAT, END = b"log ", b"heartbeat", b"end"
RECORDS: dict[bytes, type[Union[JobState, Reading]]] = {b"state ": JobState, b"reading ": Reading}
_HEADER = re.compile(rb"log (-?[0-9]{1,6}) ([0-9]{1,16}) ([0-9]{1,16})\Z")


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
    heartbeat: Annotated[float, within(0, MAX_INTERVAL)]
    offsets: dict[LogRank, Count] = field(default_factory=dict)
    ranks: Annotated[tuple[LogRank, ...], at_most(MAX_RANKS)] = ()
    since: Optional[Annotated[float, within(0, MAX_AGE)]] = None
    tail: Optional[Annotated[int, within(0, MAX_TAIL)]] = None
    setup: bool = False

    STEP = "follow"


@frozen
class Log:
    """A piece of one rank's log, at its offset in the file. What was between this piece and the one before no
    longer exists: the log was longer than its limit. An empty piece reports where a log begins. LAUNCHER_RANK
    is the launcher's own output, SETUP_RANK that of the setup commands."""

    rank: int
    offset: int
    data: bytes

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
        return b"log %d %d %d\n" % (frame.rank, frame.offset, len(frame.data)) + frame.data
    for head, kind in RECORDS.items():
        if isinstance(frame, kind):
            return head + encode_utf8(frame) + b"\n"
    return (HEARTBEAT if isinstance(frame, Heartbeat) else END) + b"\n"


def parse_log_header(line: bytes) -> tuple[int, int, int]:
    """Return rank, offset and length of a log frame, from its first line without the line break. Raises
    ProtocolError."""
    words = _HEADER.match(line)
    if words is None:
        raise ProtocolError(f"a log frame has the header {line[:60]!r}")
    rank, offset, length = (int(word) for word in words.groups())
    if not (SETUP_RANK <= rank <= MAX_RANK and offset <= MAX_COUNT and length <= MAX_PIECE):
        raise ProtocolError(f"a log frame is out of range: {line.decode()}")
    return rank, offset, length
