r"""`follow`: the logs and states of a job as a stream of frames, on stdout.

log RANK OFFSET LENGTH\n and LENGTH bytes of that rank's log
state JSON\n             the job's state, when it has changed
heartbeat\n              sent at an interval: without it the node is down, even if the job prints nothing
end\n                    the last frame: the job has ended and all of its logs were sent
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Union

from cloudddp.agent.protocol import LAUNCHER_RANK
from cloudddp.agent.protocol.codec import MAX_COUNT, ProtocolError, check_job_id, check_range, encode_utf8
from cloudddp.agent.protocol.jobs import MAX_RANK, JobState

MAX_STATE = 1 << 20  # bytes of one state: 256 ranks take 50 kB
MAX_PIECE = 1 << 16  # bytes of log in one frame
MAX_INTERVAL = 3600.0  # seconds

LOG, STATE, HEARTBEAT, END = b"log ", b"state ", b"heartbeat", b"end"
_LOG_HEADER = re.compile(rb"log (-?[0-9]{1,6}) ([0-9]{1,16}) ([0-9]{1,6})\Z")


@dataclass(frozen=True)
class FollowRequest:
    """`offsets` is where to continue each rank's log, in bytes; a rank that is not named starts at 0. With `wait` the
    stream goes on until the job has ended, with a heartbeat every `heartbeat` seconds."""

    job: str
    wait: bool
    heartbeat: float
    offsets: dict[int, int] = field(default_factory=dict)

    STEP = "follow"

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("heartbeat", self.heartbeat, 0, MAX_INTERVAL)
        for rank, offset in self.offsets.items():
            check_range("a rank", rank, LAUNCHER_RANK, MAX_RANK)
            check_range("an offset", offset, 0, MAX_COUNT)


@dataclass(frozen=True)
class Log:
    """A piece of one rank's log, at its offset in the file. LAUNCHER_RANK is the launcher's own output."""

    rank: int
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Heartbeat:
    """The node and the connection work."""


@dataclass(frozen=True)
class End:
    """The job has ended on this node (or `wait` was not requested), and every byte of its logs was sent."""


Frame = Union[Log, JobState, Heartbeat, End]


def encode_frame(frame: Frame) -> bytes:
    if isinstance(frame, Log):
        return b"log %d %d %d\n" % (frame.rank, frame.offset, len(frame.data)) + frame.data
    if isinstance(frame, JobState):
        return STATE + encode_utf8(frame) + b"\n"
    return (HEARTBEAT if isinstance(frame, Heartbeat) else END) + b"\n"


def parse_log_header(line: bytes) -> tuple[int, int, int]:
    """Return rank, offset and length of a log frame, from its first line without the line break. Raises
    ProtocolError."""
    words = _LOG_HEADER.match(line)
    if words is None:
        raise ProtocolError(f"a log frame has the header {line[:60]!r}")
    rank, offset, length = (int(word) for word in words.groups())
    if not (LAUNCHER_RANK <= rank <= MAX_RANK and offset <= MAX_COUNT and length <= MAX_PIECE):
        raise ProtocolError(f"a log frame is out of range: {line.decode()}")
    return rank, offset, length
