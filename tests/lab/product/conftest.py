"""A simulator with namespace nodes, for the tests of the product that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, CommandLine, cannot, clean_environment
from support.pool import Pool
from support.simlab import client_of

from cloudddp.simulator import control
from cloudddp.simulator.hosts import lab_namespaces


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """One simulator per test process. The interfaces of its nodes have different names."""
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    interfaces = ("ens5", "enp71s0")
    yield control.start(home, nodes="namespace", interfaces=interfaces, timeout=TIMEOUT)
    control.stop(home)


@pytest.fixture(scope="session")
def pool(lab: control.Simulator) -> Pool:
    return Pool(lab)


@pytest.fixture
def ec2(lab: control.Simulator) -> Any:
    return client_of(lab, "ec2")


@pytest.fixture
def lab_cli(
    lab: control.Simulator, pool: Pool, ec2: Any, project: Path, request: pytest.FixtureRequest
) -> Iterator[CommandLine]:
    """The command line with CLOUDDDP_SIM set, as a user runs it: it enters the lab's network by itself."""
    cluster = f"t{abs(hash(request.node.nodeid)) % 10**9}"
    env = clean_environment(
        CLOUDDDP_HOME=str(lab.home), CLOUDDDP_CLUSTER=cluster, CLOUDDDP_YES="1", CLOUDDDP_SIM="1"
    )
    line = CommandLine(project, cluster, env, pool)
    yield line
    line.end()
    if not line.give_back():
        assert line.remove(ec2) == 0
