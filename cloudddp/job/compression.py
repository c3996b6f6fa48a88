"""Whether files are compressed (zlib level 1) on their way to the nodes: only where the link is slower than
zlib."""

from __future__ import annotations

import threading
import time
import zlib

from cloudddp.agent.protocol.transfer import PLAIN, ZLIB

MEASURED = 1 << 20  # bytes after which the rate of the link is known
SAMPLE = 1 << 16  # bytes of a frame that are compressed to see how well and how fast that works
RARELY = 32  # frames of which one is sampled while the link is the faster one
DECAY = 0.9  # of what was measured before, per frame: a buffer on the way takes the first ones at once


def is_worth(link: float, compressor: float, ratio: float) -> bool:
    """Return whether it takes less time to compress and send than to send. `link` and `compressor` are bytes
    per second, `ratio` is the compressed size by the size."""
    return link < compressor * (1 - ratio)


class Compression:
    """What has been measured of the link and of the compressor in one transfer. The threads of several nodes
    may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._bytes = self._seconds = 0.0  # recent ones of the link
        self._speed = float("inf")  # of the compressor, as it was measured last
        self._unsampled = 0  # frames since

    def measure(self, size: int, seconds: float) -> None:
        """Note how long a frame has taken to leave."""
        with self._lock:
            self._total += size
            self._bytes = DECAY * self._bytes + size
            self._seconds = DECAY * self._seconds + seconds

    def encode(self, data: bytes) -> tuple[int, bytes]:
        """Return the codec for some data, and the data in that."""
        if not data or self._total < MEASURED:
            return PLAIN, data
        link = self._bytes / max(self._seconds, 1e-9)
        self._unsampled += 1
        if link > self._speed and self._unsampled < RARELY:
            return PLAIN, data
        self._unsampled = 0
        sample = data[:SAMPLE]
        began = time.thread_time()  # not the time in which other programs had the processor
        ratio = len(zlib.compress(sample, 1)) / len(sample)
        self._speed = len(sample) / max(time.thread_time() - began, 1e-9)
        return (ZLIB, zlib.compress(data, 1)) if is_worth(link, self._speed, ratio) else (PLAIN, data)
