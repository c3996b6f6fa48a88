"""A limit for a node that sends results without progress: frames that say that it works, pieces of a few
bytes, or only notes.

Progress is LEAST_PROGRESS bytes of results within STALLED seconds. Files that the node looks at count, up to
the most that a pull may have, and so do bytes that it compares with files here, up to their size.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cloudddp.errors import Command, NodeError

STALLED = 120.0  # seconds without progress
# Seconds until the results begin: before, the node reads what this computer has (up to 64 MiB of
# descriptions).
FIRST_BYTE = 1800.0
LEAST_PROGRESS = 256 << 10  # bytes


class ProgressLimit:
    """Watches `amount`, the bytes that have come so far, from a node."""

    def __init__(self, node: int, amount: Callable[[], int]) -> None:
        self._node, self._amount = node, amount
        self._counted, self._at = 0, time.monotonic()

    def take(self, feed: Callable[[bytes], object], data: bytes) -> None:
        """Pass on what the node has sent. Raises NodeError after a time without progress; that of `feed` does
        not count."""
        began = time.monotonic()
        feed(data)
        now = time.monotonic()
        self._at += now - began
        amount = self._amount()
        if amount >= self._counted + LEAST_PROGRESS or (amount and not self._counted):
            self._counted, self._at = amount, now
        elif now - self._at >= (STALLED if self._counted else FIRST_BYTE):
            reason = f"node {self._node}: it made no progress while it sent results"
            raise NodeError(
                reason,
                hint=("is the node overloaded, or its disk? Look with ", Command("ssh", str(self._node))),
                reason=reason,
            )
