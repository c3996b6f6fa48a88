"""What the ranks of this node use: CPU time, and the bytes that they read and write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from agent.node.kernel import cpu_ticks
from agent.node.processes import trees


class ResourceUsage:
    """What each rank uses, with its children."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._before: dict[int, dict[int, tuple[int, int]]] = {}  # rank -> pid -> CPU ticks, bytes

    def look(self, roots: Mapping[int, int]) -> dict[int, tuple[int, int, float]]:
        """Return the CPU ticks and the bytes that each rank has used since the last look, and the seconds.
        `roots` are their processes by rank. A process that is new has used all of it since."""
        listed, now = trees(roots.values()), time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        found = {}
        for rank, root in roots.items():
            usage = {pid: (cpu_ticks(pid), _bytes(pid)) for pid in listed[root]}
            before = self._before.get(rank)
            self._before[rank] = usage
            if before is not None:
                ticks, size = (
                    sum(max(used[kind] - before.get(pid, (0, 0))[kind], 0) for pid, used in usage.items())
                    for kind in range(2)
                )
                found[rank] = ticks, size, seconds
        return found


def _bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
