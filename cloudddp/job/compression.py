"""Whether files are compressed on their way to the nodes, and how: only where the link is slower than the compressor.

zstd level 1 where this computer can compress with it (Python 3.14, or the zstandard package: the `fast` extra) and every node
of the transfer can decompress it, else zlib level 1. None of them is required.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module

from cloudddp.agent.protocol.transfer import PLAIN, ZLIB, ZSTD

MEASURED = 1 << 20  # bytes after which the rate of the link is known
SAMPLE = 1 << 16  # bytes of a frame that are compressed to see how well and how fast that works
RARELY = 32  # frames of which one is sampled while the link is the faster one
DECAY = 0.9  # of what was measured before, per frame: a buffer on the way takes the first ones at once

Compress = Callable[[bytes], bytes]


@cache
def zstd_compressor() -> Compress | None:
    """Return the function that compresses with zstd level 1, or None where this computer has none."""
    try:
        module = import_module("compression.zstd")
        return lambda data: module.compress(data, 1)
    except ImportError:
        pass
    try:
        module = import_module("zstandard")
    except ImportError:
        return None
    # Not shared: one object may not be used by two threads.
    return lambda data: module.ZstdCompressor(level=1).compress(data)


def _zlib(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def is_worth(link: float, compressor: float, ratio: float) -> bool:
    """Return whether it takes less time to compress and send than to send. `link` and `compressor` are bytes per second,
    `ratio` is the compressed size by the size."""
    return link < compressor * (1 - ratio)


class Compression:
    """What has been measured of the link and of the compressor in one transfer. The threads of several nodes may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._bytes = self._seconds = 0.0  # recent ones of the link
        self._codec = ZLIB
        self._compress: Compress = _zlib
        self._speed = float("inf")  # of the compressor, as it was measured last
        self._unsampled = 0  # frames since

    def use_zstd(self) -> None:
        """All nodes can decompress it."""
        if (found := zstd_compressor()) is not None:
            self._codec, self._compress, self._speed = ZSTD, found, float("inf")

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
        codec, compress = self._codec, self._compress
        link = self._bytes / max(self._seconds, 1e-9)
        self._unsampled += 1
        if link > self._speed and self._unsampled < RARELY:
            return PLAIN, data
        self._unsampled = 0
        sample = data[:SAMPLE]
        began = time.thread_time()  # not the time in which other programs had the processor
        ratio = len(compress(sample)) / len(sample)
        self._speed = len(sample) / max(time.thread_time() - began, 1e-9)
        return (codec, compress(data)) if is_worth(link, self._speed, ratio) else (PLAIN, data)
