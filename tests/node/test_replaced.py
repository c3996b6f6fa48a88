"""What a job wrote where a sync writes is kept on the node, unless it was pulled."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.syncednode import SyncedNode, put, tree

from cloudddp.agent import steps
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.results import PulledRequest
from cloudddp.ssh.running import CommandSpec

OLD = {"model.pt": "old", "x/inner": "1", "data": "2", "big": b"3" * 1_500_000, "b": "5"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    put(tmp_path / "here", dict(OLD))
    return tmp_path / "here"


@pytest.fixture
def node(tmp_path: Path, here: Path) -> SyncedNode:
    """A node that has the project, and on which a job was started."""
    node = SyncedNode(tmp_path / "nodes")
    node.sync(here)
    put(node.node.home / ".cloudddp/jobs/20260101-000000-abcd", {"job.json": "{}", "began": ""})
    time.sleep(0.05)  # the file system's clock lags behind
    return node


def kept(node: SyncedNode) -> dict[str, bytes]:
    """Return what is kept, by its path in the project, and delete it."""
    found = {
        "/".join(path.relative_to(node.project / REPLACED).parts[1:]): path.read_bytes()
        for path in (node.project / REPLACED).rglob("*")
        if path.is_file()
    }
    shutil.rmtree(node.project / REPLACED, ignore_errors=True)
    return found


def to_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def to_folder(path: Path) -> None:
    path.unlink()
    put(path, {"inner": "x"})


def to_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("b")


@pytest.mark.parametrize(
    ("of_job", "change"),
    [
        ({"model.pt": "weights"}, lambda _here: None),
        ({"model.pt": "weights"}, lambda here: put(here, {"model.pt": "also changed"})),
        ({"big": b"4" * 1_600_000}, lambda _here: None),
        ({"new": "of the job"}, lambda here: put(here, {"new": "of the laptop"})),
        ({"x/runs/1": "weights"}, lambda here: to_file(here / "x")),
        ({"data": "changed"}, lambda here: to_folder(here / "data")),
        ({"data": "changed"}, lambda here: to_link(here / "data")),
        ({"name": "of the job"}, lambda here: (here / "b").rename(here / "name")),
    ],
    ids=["synced", "both", "large", "new", "folder", "file-for-folder", "file-for-link", "renamed"],
)
def test_what_a_job_wrote_is_kept_and_named(
    here: Path, node: SyncedNode, of_job: dict[str, str | bytes], change: Callable[[Path], object]
) -> None:
    put(node.project, of_job)
    change(here)
    said = node.sync(here)
    (name,) = of_job
    data = of_job[name]
    assert kept(node) == {name: data if isinstance(data, bytes) else data.encode()}
    assert tree(node.project) == tree(here)
    top = "x" if name.startswith("x/") else name
    assert f"warning: node 0: a job wrote {top}, which was not pulled" in said
    assert f"{REPLACED}" in said


def pulled(node: SyncedNode) -> None:
    put(node.project, {"model.pt": "weights"})
    time.sleep(0.05)
    command = f"python3 -IS {node.node.home}/{steps.agent_path()} pulled"
    request = _request(PulledRequest("project", ("model.pt",), time.time_ns()))
    done = node.cluster.runner.run(0, CommandSpec(command, request))
    assert done.exit_code == 0, done.stderr


def _request(request: PulledRequest) -> bytes:
    from cloudddp.agent.protocol.codec import encode

    return encode(request) + b"\n"


def touched(node: SyncedNode) -> None:
    os.utime(node.project / "model.pt")


def caches(node: SyncedNode) -> None:
    (node.project / "data").unlink()
    put(node.project, {"data/__pycache__/m.pyc": "x"})


@pytest.mark.parametrize("case", [pulled, touched, caches])
def test_files_that_are_no_loss_are_replaced_without_a_warning(
    here: Path, node: SyncedNode, case: Callable[[SyncedNode], None]
) -> None:
    case(node)
    assert "a job wrote" not in node.sync(here)
    assert kept(node) == {}
    assert tree(node.project) == tree(here)


def test_file_that_a_job_changed_stays_where_it_is_deleted_here(here: Path, node: SyncedNode) -> None:
    put(node.project, {"model.pt": "weights"})
    (here / "model.pt").unlink()
    node.sync(here)
    assert (node.project / "model.pt").read_text() == "weights"
