"""The laptop of a sync: frames on stdin, reports on stdout."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from typing import Callable, Optional

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import encode_utf8
from cloudddp.agent.protocol.file_steps import ReceiveEvent
from cloudddp.agent.protocol.transfer import Frame

TICK = 1.0  # seconds between two looks whether the laptop is there
ALIVE = 5.0  # seconds between two reports that this node is
LOST = 120.0  # seconds of waiting for a byte from the laptop, which sends one every second
STUCK = 900.0  # seconds without progress, for example while a disk flushes, until this node reports no more

_writing = threading.Lock()


def report(event: ReceiveEvent) -> None:
    with _writing:
        sys.stdout.buffer.write(encode_utf8(event) + b"\n")
        sys.stdout.buffer.flush()


class Laptop:
    """The frames on stdin. A thread reports that this node is there, and ends this process if the laptop is
    not. `progress` returns a number that grows."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._waits_since: Optional[float] = None
        self._reads = 0
        self.progress: Callable[[], int] = lambda: 0
        threading.Thread(target=self._watch, daemon=True).start()

    def read(self) -> Frame:
        """Return the next frame. Raises ProtocolError, and EOFError where the laptop ends the sync."""
        frame = transfer.read_frame(self._read, self._secret)
        while frame.kind == transfer.ALIVE:
            frame = transfer.read_frame(self._read, self._secret)
        if frame.kind == transfer.CLOSE:  # what follows on stdin is not of this sync
            raise EOFError("the sync has ended")
        return frame

    def _read(self, size: int) -> bytes:
        """Read without Python's buffer: a thread that waits there holds its lock, and Python aborts if the
        process ends meanwhile."""
        pieces = []
        while size > 0:
            self._waits_since = time.monotonic()
            piece = os.read(sys.stdin.fileno(), size)
            self._waits_since = None
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        self._reads += 1
        return b"".join(pieces)

    def _watch(self) -> None:
        ended, last, moved, said = select.poll(), (0, 0), time.monotonic(), 0.0
        ended.register(sys.stdin.fileno(), select.POLLHUP)
        while True:
            time.sleep(TICK)
            now, since = time.monotonic(), self._waits_since
            if (since is None and ended.poll(0)) or (since is not None and now - since > LOST):
                os._exit(1)
            if (present := (self._reads, self.progress())) != last or since is not None:
                last, moved = present, now
            if now - moved < STUCK and now - said >= ALIVE:
                said = now
                try:
                    report(ReceiveEvent(busy=since is None))
                except OSError:
                    os._exit(1)
