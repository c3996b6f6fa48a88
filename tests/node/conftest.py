"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import Node
from support.buckets import make_bucket
from support.gangs import Gangs, Make
from support.s3_server import S3


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


@pytest.fixture
def s3() -> Iterator[S3]:
    """moto's S3 with a bucket named `results`."""
    server = S3()
    for _ in make_bucket(server.client, "results"):
        yield server
        server.answer = lambda _: None
    server.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of files on this computer."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder
