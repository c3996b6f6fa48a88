"""A separate lab for each test of other programs; a simulator of machine nodes per process of the tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import ROOT, cannot, clean_environment
from support.witnesslab import MARK, Lab, end_marked

from cloudddp.simulator import control
from cloudddp.simulator.hosts import lab_namespaces
from cloudddp.simulator.hosts.machines import root_image
from cloudddp.simulator.linux import processes

ROOTS = ROOT / ".venv-witness" / "roots"  # made once: a minute


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab for one test; afterwards all processes of the lab and of the programs in it have ended."""
    if reason := lab_namespaces.unavailable_reason():
        cannot(f"no namespaces: {reason}")
    home, folder = tmp_path / "lab", tmp_path / "user"
    for path in (home, folder, folder / "tmp"):
        path.mkdir()
    mark = uuid.uuid4().hex
    env = clean_environment(
        CLOUDDDP_HOME=str(home), HOME=str(folder), TMPDIR=str(folder / "tmp"), **{MARK: mark}
    )
    sim = control.start(home, nodes="namespace")
    try:
        yield Lab(sim, folder, env)
    finally:
        control.stop(home)
        end_marked(mark)
    assert processes.belonging(home) == []


@pytest.fixture(scope="session")
def root_images() -> Iterator[None]:
    """Where the operating system of machine nodes is kept; skips a test where they are not available."""
    if reason := root_image.unavailable_reason() or lab_namespaces.unavailable_reason():
        cannot(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(root_image.VARIABLE, str(ROOTS))
        yield


@pytest.fixture(scope="session")
def machines(root_images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """One simulator with machine nodes; afterwards all of its processes have ended."""
    home = tmp_path_factory.mktemp("machines")
    yield control.start(home, nodes="machine")
    control.stop(home)
    assert processes.belonging(home) == []
