"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentnode import Node, processes_of


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "home")
    yield made
    for folder in (made.home / ".cloudddp" / "jobs").glob("*"):
        made.answer("kill", f"--job={folder.name}", "--cancel", "--grace=0")
    left = processes_of(made.home)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
