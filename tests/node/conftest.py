"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node
from support.buckets import make_bucket
from support.gangs import Gangs, Make
from support.s3_server import S3
from support.victim import Victim, owned


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


@pytest.fixture(scope="session")
def owned_cluster(simulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with owned(simulator, tmp_path_factory.mktemp("victim")) as found:
        yield found


@pytest.fixture
def victim(owned_cluster: Victim) -> Iterator[Victim]:
    owned_cluster.evil.mkdir(exist_ok=True)
    yield owned_cluster
    shutil.rmtree(owned_cluster.evil)


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
