"""The node that the agent's tests share: nothing of it may be left running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node
from support.buckets import make_bucket
from support.gangs import Gangs, Make
from support.imds import Metadata
from support.localsync import LocalCluster
from support.s3_server import S3
from support.victim import Victim, owned

HERE = Path(__file__).parent
PORTABLE = {f"test_{name}.py" for name in ("protocol", "pull_from_s3")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")
    for item in items:
        if item.path.parent == HERE and item.path.name not in PORTABLE:
            item.add_marker(needs_linux)


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
def metadata(node: Node) -> Iterator[Metadata]:
    """The metadata service of the node."""
    server = Metadata()
    node.metadata = server.address
    yield server
    server.close()


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Make]:
    made: list[Gangs] = []

    def make(nodes: int, **limits: float) -> Gangs:
        made.append(Gangs(tmp_path / str(len(made)), nodes, **limits))
        return made[-1]

    yield make
    assert [pid for one in made for pid in one.end()] == []


@pytest.fixture
def pair(gangs: Make) -> Gangs:
    """Two nodes whose instances have ids."""
    job = gangs(2, silence=5)
    job.gang = replace(job.gang, peers=tuple(replace(peer, id=f"i-{peer.node}") for peer in job.gang.peers))
    return job


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
def synced(tmp_path: Path) -> LocalCluster:
    """A node that is synced as the laptop does."""
    return LocalCluster(tmp_path / "nodes")
