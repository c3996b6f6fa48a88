"""What a job wrote where a sync writes is kept on the node, unless it was pulled."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from support.localsync import LocalCluster, put, tree

from cloudddp.agent import program
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.results import PulledRequest
from cloudddp.ssh.running import CommandSpec

OLD = {
    "model.pt": "old",
    "x/inner": "1",
    "data": "2",
    "big": b"3" * 1_500_000,
    "b": "5",
    "c": "6",
    "link": "7",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    put(tmp_path / "here", dict(OLD))
    return tmp_path / "here"


@pytest.fixture
def node(tmp_path: Path, here: Path) -> LocalCluster:
    """A node that has the project, and on which a job was started."""
    node = LocalCluster(tmp_path / "nodes", 1)
    node.sync(here)
    put(node.home / ".cloudddp/jobs/20260101-000000-abcd", {"job.json": "{}", "began": ""})
    time.sleep(0.05)  # the file system's clock lags behind
    return node


def kept(node: LocalCluster) -> dict[str, bytes]:
    """Return what is kept, by its path in the project, and delete it."""
    found = {
        "/".join(path.relative_to(node.project / REPLACED).parts[1:]): path.read_bytes()
        for path in (node.project / REPLACED).rglob("*")
        if path.is_file()
    }
    shutil.rmtree(node.project / REPLACED, ignore_errors=True)
    return found


def test_what_a_job_wrote_is_kept_and_named(here: Path, node: LocalCluster) -> None:
    """A file that is synced, changed here, too, large, new or renamed here; a folder, a file and a link in
    the place of what it wrote."""
    of_job: dict[str, str | bytes] = {
        "model.pt": "weights",
        "b": "of the job",
        "big": b"4" * 1_600_000,
        "new": "of the job",
        "name": "of the job",
        "x/runs/1": "weights",
        "data": "changed",
        "link": "changed",
    }
    put(node.project, of_job)
    put(here, {"b": "also changed", "new": "of the laptop"})
    (here / "c").rename(here / "name")
    shutil.rmtree(here / "x")
    (here / "x").write_text("a file")
    (here / "data").unlink()
    put(here, {"data/inner": "x"})
    (here / "link").unlink()
    (here / "link").symlink_to("b")
    said = node.sync(here)
    assert kept(node) == {
        name: data if isinstance(data, bytes) else data.encode() for name, data in of_job.items()
    }
    assert tree(node.project) == tree(here)
    assert re.search(
        r"warning: node 0: a job wrote [\w.]+, [\w.]+, [\w.]+, 5 more, which was not pulled", said
    ), said
    assert f"{REPLACED}" in said


def pulled(node: LocalCluster) -> None:
    put(node.project, {"model.pt": "weights"})
    time.sleep(0.05)
    command = f"python3 -IS {node.home}/{program.agent_path()} pulled"
    request = encode(PulledRequest("project", ("model.pt",), time.time_ns())) + b"\n"
    done = node.runner.run(0, CommandSpec(command, request))
    assert done.exit_code == 0, done.stderr


def test_files_that_are_no_loss_are_replaced_without_a_warning(here: Path, node: LocalCluster) -> None:
    """What was pulled, has the same contents, or is a cache."""
    pulled(node)
    os.utime(node.project / "b")
    (node.project / "data").unlink()
    put(node.project, {"data/__pycache__/m.pyc": "x"})
    assert "a job wrote" not in node.sync(here)
    assert kept(node) == {}
    assert tree(node.project) == tree(here)


def test_file_that_a_job_changed_stays_where_it_is_deleted_here(here: Path, node: LocalCluster) -> None:
    put(node.project, {"model.pt": "weights"})
    (here / "model.pt").unlink()
    node.sync(here)
    assert (node.project / "model.pt").read_text() == "weights"
