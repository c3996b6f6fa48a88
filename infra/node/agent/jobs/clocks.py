"""By how much the clock of this node is ahead of those of the others at most, for each attempt of a job.

A heartbeat has the time at which it was sent. The difference to the time here is how much this clock is
ahead, and how long the message took: so the least of a few is closest. Clocks drift and are set, so the
largest of these bounds is kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

from agent.node import store
from cloudddp.agent.protocol.codec import encode

FEW = 10  # messages


class Clocks:
    """The bounds of one attempt, in a file of the job's folder."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._path = _file(folder, attempt)
        self._latest: dict[int, deque[int]] = {}  # node -> ns
        self._ahead: dict[str, int] = {}

    def heard(self, node: int, sent: int, now: int) -> None:
        """Take when a message was sent, by its sender's clock, and came, by this one's (ns)."""
        latest = self._latest.setdefault(node, deque(maxlen=FEW))
        before = self._ahead.get(str(node))
        has_few = len(latest) == FEW
        latest.append(now - sent)
        bound = max(min(latest), before) if has_few and before is not None else min(latest)
        if bound != before:
            self._ahead[str(node)] = bound
            # On a full disk nothing is known of the clocks: the reserve is for how the job ends.
            with contextlib.suppress(OSError):
                temporary = self._path.with_suffix(".tmp")
                temporary.write_bytes(encode(self._ahead))
                temporary.replace(self._path)


def ahead(folder: Path, attempt: int) -> dict[str, int]:
    """Return the bounds (ns) of an attempt of the job with this folder, by node."""
    return store.read(_file(folder, attempt), dict[str, int]) or {}


def _file(folder: Path, attempt: int) -> Path:
    return folder / f"clocks-{attempt}.json"
