"""Clusters that several tests use one after the other, since creating and removing one costs more than most
tests.

A test requests nodes with `CommandLine.nodes`. After the test, if every node is running, the user's
processes on them are ended, faults healed and the homes emptied for the next test. Otherwise the cluster is
removed. Tests of `up`, `down`, costs, deadlines and AWS calls create clusters of their own, and so do tests
that change a node outside its home or the start files of its shell.
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

from cloudddp.simulator import control

LINGER = 5.0  # seconds in which killed processes are gone
# In the homes: what namespace nodes have from their image, and the agent. Its byte code is expensive, and
# each command verifies its sources.
KEPT = (".ssh", ".bashrc", ".profile", ".bash_logout", ".cloudddp/agent-*")


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
        while left := [pid for node in self._nodes(cluster) for pid in self._of_the_user(node)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        nodes = self._nodes(cluster)
        if len(nodes) != count or any(node["state"] != "running" for node in nodes):
            return False
        for node in nodes:
            if node["faults"]:
                control.fault(self._simulator, "heal", [node["instance_id"]])
            _empty(Path(node["home"]))
        self._idle[count, instance_type].append(cluster)
        return True

    def _nodes(self, cluster: str) -> list[dict[str, Any]]:
        return [node for node in control.nodes(self._simulator) if node["cluster"] == cluster]

    def _of_the_user(self, node: dict[str, Any]) -> list[int]:
        """Return the processes that are not the machine's own: a namespace node runs init and sshd."""
        return [pid for pid in node["processes"] if self._simulator.nodes == "process" or _owner(pid) != 0]


def _owner(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return 0


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if any(path.match(name) for name in KEPT):
            continue
        if path.name == ".cloudddp":
            _empty(path)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
