"""One simulator per test process, shared by all tests that do not harm it, and laptops that clean up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from simlab import Laptop

from cloudddp.sim import control, processes


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    home = tmp_path_factory.mktemp("home")
    yield control.start(home)
    control.stop(home)
    assert processes.belonging(home) == []


@pytest.fixture
def laptop(sim: control.Simulator, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    laptop = Laptop(sim, f"key of {request.node.name}")
    yield laptop
    laptop.leave()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for a simulator of the test's own; nothing of it outlives the test."""
    yield tmp_path
    control.stop(tmp_path)
    assert processes.belonging(tmp_path) == []


@pytest.fixture(scope="module")
def node(sim: control.Simulator, request: pytest.FixtureRequest) -> Iterator[tuple[Laptop, dict[str, Any]]]:
    """One running node for the tests of a module that do not harm it."""
    laptop = Laptop(sim, f"key of {request.node.name}")
    yield laptop, laptop.launch()[0]
    laptop.leave()


@pytest.fixture(scope="module")
def ssh(node: tuple[Laptop, dict[str, Any]]) -> paramiko.SSHClient:
    laptop, instance = node
    return laptop.connect(instance["PublicIpAddress"])
