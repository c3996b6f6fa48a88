"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentnode import HANG_GUARD, Node, processes_of


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "home")
    yield made
    for folder in (made.home / ".cloudddp" / "jobs").glob("*"):
        made.answer("kill", f"--job={folder.name}", "--cancel", "--grace=0")
    patience = time.monotonic() + HANG_GUARD
    while processes_of(made.home) and time.monotonic() < patience:
        time.sleep(0.02)  # the supervisor has said how the job ended, and is on its way out
    left = processes_of(made.home)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []
