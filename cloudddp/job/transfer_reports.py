"""What a node reports during a transfer, line by line. Any program of its login user may write them, so all
of it has limits."""

from __future__ import annotations

from collections.abc import Iterator

from cloudddp.agent.decode import decode
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.receive import ReceiveEvent

MAX_LINE = 4 << 20  # bytes of a report: the indexes of 100,000 files take 700 kB
BYTES_PER_SECOND = 64 << 10  # of all reports, besides two long ones
MAX_REPORTS = 200  # at once, and:
REPORTS_PER_SECOND = 20  # the agent sends two, and some more at the beginning
MAX_NOTES = 20


class Reports:
    """The reports of one node. `began`: when the transfer did."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._line = bytearray()  # the beginning of a report
        self._size = 0  # bytes of all reports
        self._count = self._notes = 0

    def feed(self, data: bytes, now: float) -> Iterator[ReceiveEvent]:
        """Yield the reports that are complete. Raises ProtocolError for what no agent sends."""
        self._line += data
        self._size += len(data)
        allowed = 2 * MAX_LINE + BYTES_PER_SECOND * (now - self._began)
        if len(self._line) > MAX_LINE or self._size > allowed:
            raise ProtocolError("a report is too long")
        if b"\n" not in data:
            return
        *lines, rest = bytes(self._line).split(b"\n")
        self._line[:] = rest
        for line in lines:
            event = decode(line, ReceiveEvent)
            self._check(event, now)
            yield event

    def _check(self, event: ReceiveEvent, now: float) -> None:
        self._count += 1
        if self._count > MAX_REPORTS + REPORTS_PER_SECOND * (now - self._began):
            raise ProtocolError("it sends too many reports")
        self._notes += bool(event.note)
        if self._notes > MAX_NOTES:
            raise ProtocolError("it sends too many notes")
