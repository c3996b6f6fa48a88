"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import Node
from support.gangs import Gangs, Make


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path / "home")
    yield found
    left = found.end()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Make]:
    made: list[Gangs] = []

    def make(nodes: int, **limits: float) -> Gangs:
        made.append(Gangs(tmp_path / str(len(made)), nodes, **limits))
        return made[-1]

    yield make
    assert [pid for one in made for pid in one.end()] == []
