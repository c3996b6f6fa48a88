"""Clusters that several tests use one after the other, since creating and removing one costs more than most
tests.

A test requests nodes with `CommandLine.nodes`. After the test, the processes on its nodes are ended and the
homes emptied for the next test, if every node is running and has no fault. Otherwise the cluster is removed.
Tests of `up`, `down`, costs, deadlines and AWS calls create clusters of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from cloudddp.sim import control

LINGER = 5.0  # seconds in which killed processes are gone


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
        while left := [pid for node in self._nodes(cluster) for pid in node["processes"]]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
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
