"""Splits the agent's `follow` stream into frames. Pure: bytes in, records out."""

from __future__ import annotations

from collections.abc import Iterator

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import (
    DROPPED,
    END,
    HEARTBEAT,
    LOG,
    MAX_STATE,
    STATE,
    End,
    Frame,
    Heartbeat,
    Log,
    parse_dropped,
    parse_log_header,
)
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.steps import decode


class FrameDecoder:
    """Splits a byte stream into frames. It never holds more than one frame and the bytes just fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer that contain no line break
        self._ranks: set[int] = set()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError for bytes that no agent sends."""
        self._buffer += data
        while (cut := self._buffer.find(b"\n", self._searched)) >= 0:
            frame, end = self._frame(bytes(self._buffer[:cut]), cut + 1)
            if frame is None:
                self._searched = cut
                return
            del self._buffer[:end]
            self._searched = 0
            yield frame
        self._searched = len(self._buffer)
        if self._searched > MAX_STATE:
            raise ProtocolError(f"a frame is longer than {MAX_STATE} bytes")

    def _frame(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        """Return the frame that begins with `line`, None while it is incomplete, and its end in the
        buffer."""
        if line.startswith(LOG):
            return self._log(line, start)
        if line.startswith(DROPPED):
            dropped = parse_dropped(line)
            self._count(dropped.rank)
            return dropped, start
        if line.startswith(STATE):
            return decode(line[len(STATE) :], JobState, limit=MAX_STATE), start
        if line == HEARTBEAT:
            return Heartbeat(), start
        if line == END:
            return End(), start
        raise ProtocolError(f"it begins a frame with {line[:20]!r}")

    def _log(self, line: bytes, start: int) -> tuple[Frame | None, int]:
        rank, offset, length = parse_log_header(line)
        self._count(rank)
        end = start + length
        if end > len(self._buffer):
            return None, end
        return Log(rank, offset, bytes(self._buffer[start:end])), end

    def _count(self, rank: int) -> None:
        self._ranks.add(rank)
        if len(self._ranks) > MAX_RANKS + 2:  # with the launcher and the setup
            raise ProtocolError(f"it has logs of more than {MAX_RANKS} ranks")
