"""Files with holes: where they have data, and a log without the part that was dropped."""

from __future__ import annotations

import os
from typing import Union

MAX_PARTS = 10_000  # of a file with holes


def data_of(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return where a file has data, up to `size`: begin and end of each part between two holes. Of a file
    with very many holes the rest counts as data."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < size and len(found) < MAX_PARTS:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        except OSError:  # no data until the end
            return found
        if begin < size:
            found.append((begin, at))
    return found if at >= size else [*found, (at, size)]


class WithoutHoles:
    """A log without the part that ranks/rank_log.py has removed, which would be sent as zeros: a line says
    how long it was."""

    def __init__(self, descriptor: int, size: int, parts: list[tuple[int, int]]) -> None:
        self._descriptor = descriptor
        self._pieces: list[Union[bytes, tuple[int, int]]] = []
        last = 0
        for begin, end in [*parts, (size, size)]:
            if begin > last:
                self._pieces.append(
                    b"\n[cloudddp: %d bytes of this log were dropped here]\n" % (begin - last)
                )
            if end > begin:
                self._pieces.append((begin, end))
            last = end
        self.size = sum(len(one) if isinstance(one, bytes) else one[1] - one[0] for one in self._pieces)

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end."""
        found = bytearray()
        while self._pieces and len(found) < count:
            found += self._next(count - len(found))
        return bytes(found)

    def _next(self, count: int) -> bytes:
        piece = self._pieces.pop(0)
        if isinstance(piece, bytes):
            data, rest = piece[:count], piece[count:]
            self._pieces[:0] = [rest] if rest else []
            return data
        begin, end = piece
        wanted = min(count, end - begin)
        data = os.pread(self._descriptor, wanted, begin) or bytes(wanted)  # it has become shorter
        begin += len(data)
        self._pieces[:0] = [(begin, end)] if begin < end else []
        return data
