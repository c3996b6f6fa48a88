"""One simulator per test process, shared by all tests that do not harm it, and laptops that clean up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import lab as labs
import paramiko
import pytest
from account import Account, post_conditions
from harness import TIMEOUT, cannot
from simlab import Laptop, client_of

from cloudddp.sim import control, processes
from cloudddp.sim.aws import CONDITIONS, rehearse


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator of loopback nodes, which are there on every Linux."""
    home = tmp_path_factory.mktemp("home")
    yield control.start(home, nodes="process", timeout=TIMEOUT)
    control.stop(home)
    assert processes.belonging(home) == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator of namespace nodes; skips where there can be none."""
    if why := labs.obstacle():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    yield control.start(home, nodes="namespace", timeout=TIMEOUT)
    control.stop(home)
    assert processes.belonging(home) == []


@pytest.fixture
def resident(lab: control.Simulator, request: pytest.FixtureRequest) -> Iterator[labs.LabLaptop]:
    """A laptop of the test's own in the lab; what it launched is terminated after the test."""
    laptop = labs.LabLaptop(lab, f"key of {request.node.name}")
    yield laptop
    laptop.leave()


@pytest.fixture(scope="module")
def neighbour(lab: control.Simulator, request: pytest.FixtureRequest) -> Iterator[labs.LabLaptop]:
    """A laptop in the lab for a whole module."""
    laptop = labs.LabLaptop(lab, f"key of {request.node.name}")
    yield laptop
    laptop.leave()


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


@pytest.fixture
def remote(sim: control.Simulator) -> Iterator[Account]:
    """The simulator's account over HTTP; nothing of it outlives the test."""

    def set_conditions(body: dict[str, Any]) -> dict[str, Any]:
        status, answer = post_conditions(sim.endpoint, body)
        assert status == 200, answer
        return answer

    account = Account(functools.partial(client_of, sim), set_conditions)
    yield account
    account.leave()


@pytest.fixture(params=["server", "rehearsal"])
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    """An account whose rules have to be the same over HTTP and in process."""
    if request.param == "server":
        yield request.getfixturevalue("remote")
        return
    with rehearse():
        yield Account(boto3.client, lambda body: CONDITIONS.update(body).to_json())
        CONDITIONS.update({"clear": True})
