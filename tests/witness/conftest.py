"""A separate lab for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import cannot, clean_environment
from support.witnesslab import MARK, Lab, end_marked

from cloudddp.sim import control
from cloudddp.sim.hosts import lab_namespaces
from cloudddp.sim.linux import processes


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
