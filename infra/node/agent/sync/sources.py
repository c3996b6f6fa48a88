"""Where a node gets the files of a sync from: the laptop, on stdin, or the first node, on a connection."""

from __future__ import annotations

import os
import sys
import threading
import time
from io import BufferedReader
from typing import Optional, cast

from agent.node.link import Link
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import encode_utf8
from cloudddp.agent.protocol.file_steps import ReceiveEvent
from cloudddp.agent.protocol.transfer import Frame, Wants

_writing = threading.Lock()


def report(event: ReceiveEvent) -> None:
    with _writing:
        sys.stdout.buffer.write(encode_utf8(event) + b"\n")
        sys.stdout.buffer.flush()


class SourceLost(Exception):
    """A source cannot be used any more; the text says why."""


class Laptop:
    """The frames on stdin."""

    name = "this computer"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._read_before = _buffered_stdin()
        self._waits_since: Optional[float] = None
        self.pending = 0  # bytes of a frame that has not arrived completely

    def _read(self, size: int) -> bytes:
        pieces = []
        while size > 0:
            piece, self._read_before = self._read_before[:size], self._read_before[size:]
            if not piece:
                self._waits_since = time.monotonic()
                piece = os.read(sys.stdin.fileno(), size)
                self._waits_since = None
            if not piece:
                break
            self.pending += len(piece)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def read(self) -> Frame:
        frame = transfer.read_frame(self._read, self._secret)
        self.pending = 0
        if frame.kind == transfer.CLOSE:  # what follows on stdin is not of this sync
            raise EOFError("the sync has ended")
        return frame

    @property
    def silence(self) -> float:
        """For how many seconds this node has been waiting for the laptop. While it works, it does not look at
        what has come."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def ask(self, wants: Wants) -> None:
        report(ReceiveEvent(wants=wants))


def _buffered_stdin() -> bytes:
    """Return what Python has read of stdin besides the request. From now on it is read without Python's
    buffer: a thread that waits there holds the buffer's lock, and Python aborts if the process ends
    meanwhile."""
    descriptor, buffer = sys.stdin.fileno(), cast(BufferedReader, sys.stdin.buffer)
    os.set_blocking(descriptor, False)
    try:
        return buffer.read1(len(buffer.peek()))
    finally:
        os.set_blocking(descriptor, True)


class FirstNode:
    """The frames of the node that serves the others."""

    def __init__(self, link: Link, node: int, secret: bytes) -> None:
        self._link, self._secret = link, secret
        self.name = f"node {node}"
        self.end, self.close = link.end, link.close

    def read(self) -> Frame:
        return transfer.read_frame(self._link.read_all, self._secret)

    def ask(self, wants: Wants) -> None:
        self._link.write_all(wants.frame(self._secret))
