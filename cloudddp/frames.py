"""What the agent's `follow` writes, cut into frames, and a log cut into lines. Pure: bytes in, words out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class Frames:
    """Cuts the agent's byte stream into frames: ("log", rank, offset, data), ("state", dict), ("end",)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        self._buffer += data
        while (cut := self._buffer.find(b"\n")) >= 0:
            words = bytes(self._buffer[:cut]).split(b" ", 3)
            end = cut + 1
            if words[0] == b"log":
                rank, offset, length = (int(word) for word in words[1:4])
                if len(self._buffer) < end + length:
                    return
                body = bytes(self._buffer[end : end + length])
                end += length
                yield "log", rank, offset, body
            elif words[0] == b"state":
                yield "state", json.loads(bytes(self._buffer[6:cut]))
            elif words[0] == b"end":
                yield ("end",)
            del self._buffer[:end]


def lines_of(data: bytes) -> list[str]:
    """Return the lines of a piece of log as a terminal would show them: what a `\\r` overwrote is left out."""
    text = data.decode("utf-8", errors="replace")
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines]
