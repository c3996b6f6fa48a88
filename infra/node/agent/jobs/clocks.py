"""By how much the clock of this node is ahead of those of the others at most, for each attempt of a job.

A heartbeat has the time at which it was sent. The difference to the time here is how much this clock is
ahead, and how long the message took: so the least of a few is closest. Clocks drift and are set, so the
largest of these bounds is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from agent.node import store
from cloudddp.agent.protocol.frozen import frozen

FILE = "clocks.json"
FEW = 10  # heartbeats


@frozen
class _Clocks:
    attempt: int
    ahead: dict[str, int] = field(default_factory=dict)  # by instance, ns


class Clocks:
    """The bounds of one attempt. `ids` are the instances of the nodes."""

    def __init__(self, folder: Path, attempt: int, ids: Mapping[int, str]) -> None:
        self._path, self._attempt, self._ids = folder / FILE, attempt, ids
        self._latest: dict[int, list[int]] = {}  # node -> ns
        self._bounds: dict[int, int] = {}  # of a few heartbeats each, the largest
        self._written: dict[str, int] = {}

    def heard(self, node: int, sent: int, now: int) -> None:
        """Take when a heartbeat was sent, by its sender's clock, and came, by this one's (ns)."""
        latest = self._latest.setdefault(node, [])
        latest.append(now - sent)
        bound = max(min(latest), self._bounds.get(node, min(latest)))
        if len(latest) == FEW:
            self._bounds[node] = bound
            latest.clear()
        elif node in self._bounds:
            return
        if self._written.get(self._ids[node]) != bound:
            self._written[self._ids[node]] = bound
            with contextlib.suppress(OSError):  # a full disk: nothing is known of the clocks then
                store.write(self._path, _Clocks(self._attempt, self._written))


def ahead(folder: Path, attempt: int) -> dict[str, int]:
    """Return the bounds (ns) of an attempt of the job with this folder, by instance."""
    found = store.read(folder / FILE, _Clocks)
    return found.ahead if found is not None and found.attempt == attempt else {}
