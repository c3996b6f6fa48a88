"""Clusters that several tests use one after the other, since creating and removing one costs more than most tests.

A test asks for nodes with `CommandLine.nodes`. When it has passed, its cluster is checked: every node running, no fault
set, no process left. Then the homes of its nodes are emptied and the next test gets the cluster as new. Otherwise it is
removed. Tests of `up`, `down`, costs, deadlines and AWS calls create clusters of their own.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from cloudddp.sim import control

LINGER = 5.0  # seconds for the last processes of a job to end after it has been reported as ended


class Pool:
    """The idle clusters of one test process, by number of nodes and instance type."""

    def __init__(self, simulator: Any) -> None:
        self._simulator = simulator
        self._idle: dict[tuple[int, str], list[str]] = defaultdict(list)

    def take(self, count: int, instance_type: str) -> str | None:
        """Return the name of an idle cluster, which now belongs to the caller; None if there is none."""
        idle = self._idle[count, instance_type]
        return idle.pop() if idle else None

    def give_back(self, cluster: str, count: int, instance_type: str) -> bool:
        """Keep a cluster for another test; return False if it cannot be used again."""
        deadline = time.monotonic() + LINGER
        while any(node["processes"] for node in self._nodes(cluster)) and time.monotonic() < deadline:
            time.sleep(0.05)
        nodes = self._nodes(cluster)
        usable = all(
            node["state"] == "running" and not node["processes"] and not node["faults"] for node in nodes
        )
        if len(nodes) != count or not usable:
            return False
        for node in nodes:
            _empty(Path(node["home"]))
        self._idle[count, instance_type].append(cluster)
        return True

    def _nodes(self, cluster: str) -> list[dict[str, Any]]:
        return [node for node in control.nodes(self._simulator) if node["cluster"] == cluster]


def _empty(home: Path) -> None:
    for path in home.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
