"""One simulator of each kind per test process, for tests that do not harm it, and clients that clean up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import paramiko
import pytest
from support import labnode as labs
from support.account import Account, post_conditions
from support.harness import TIMEOUT, cannot
from support.simlab import Laptop, client_of

from cloudddp.simulator import control
from cloudddp.simulator.aws import CONDITIONS, rehearse
from cloudddp.simulator.linux import processes


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator with loopback nodes, which work on every Linux."""
    home = tmp_path_factory.mktemp("home")
    yield control.start(home, nodes="process", timeout=TIMEOUT)
    control.stop(home)
    assert processes.belonging(home) == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """A simulator with namespace nodes; skips if they are not available."""
    if why := labs.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    yield control.start(home, nodes="namespace", timeout=TIMEOUT)
    control.stop(home)
    assert processes.belonging(home) == []


@pytest.fixture
def lab_laptop(lab: control.Simulator, request: pytest.FixtureRequest) -> Iterator[labs.LabLaptop]:
    """A laptop in the lab for one test; its instances are terminated after the test."""
    laptop = labs.LabLaptop(lab, f"key of {request.node.name}")
    yield laptop
    laptop.leave()


@pytest.fixture(scope="module")
def shared_lab_laptop(lab: control.Simulator, request: pytest.FixtureRequest) -> Iterator[labs.LabLaptop]:
    """A laptop in the lab for all tests of a module."""
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
    """The home of a simulator for one test, which is stopped after the test."""
    yield tmp_path
    control.stop(tmp_path)
    assert processes.belonging(tmp_path) == []


@pytest.fixture(scope="module")
def node(sim: control.Simulator, request: pytest.FixtureRequest) -> Iterator[tuple[Laptop, dict[str, Any]]]:
    """One running node, shared by the tests of a module."""
    laptop = Laptop(sim, f"key of {request.node.name}")
    yield laptop, laptop.launch()[0]
    laptop.leave()


@pytest.fixture(scope="module")
def ssh(node: tuple[Laptop, dict[str, Any]]) -> paramiko.SSHClient:
    laptop, instance = node
    return laptop.connect(instance["PublicIpAddress"])


@pytest.fixture
def remote(sim: control.Simulator) -> Iterator[Account]:
    """The simulator's account over HTTP, cleaned up after the test."""

    def set_conditions(body: dict[str, Any]) -> dict[str, Any]:
        status, answer = post_conditions(sim.endpoint, body)
        assert status == 200, answer
        return answer

    account = Account(functools.partial(client_of, sim), set_conditions)
    yield account
    account.leave()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of `account` in process, or over HTTP if it has the mark `over_http`."""
    if "account" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker("over_http")
        metafunc.parametrize("account", ["server" if marked else "rehearsal"], indirect=True)


@pytest.fixture
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    """The account in process, or over HTTP for tests that are marked so.

    Both run the same patched moto, so EC2's rules are the same. Over HTTP run some of each module, for
    what differs: errors and their status, nested lists, times and unusual characters, JSON beside the query
    protocol, actions that moto lacks, and tokens, which outlive the tests of a server that is shared.
    Throttling, lost responses, signatures and concurrent calls use `remote`.
    """
    if request.param == "server":
        yield request.getfixturevalue("remote")
        return
    with rehearse():
        yield Account(boto3.client, lambda body: CONDITIONS.update(body).to_json())
        CONDITIONS.update({"clear": True})
