"""Files whose size, place or writer a copier would get wrong: those that grow meanwhile, copies that are
moved aside, those among more files than a search has time for, data that has nowhere to go."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.agentnode import Node
from support.jobs import WRITE
from support.localsync import LocalNode, LocalRunner, put

from agent.files import records, scan
from agent.files.records import Writer
from agent.node import store
from agent.s3 import download
from agent.share import offers
from agent.sync.replaced import set_aside
from cloudddp.agent.protocol.file_steps import REPLACED, PackRequest
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.sharing import SnapshotSearch
from cloudddp.job.results.pull import pull


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project of this process."""
    monkeypatch.setattr(store, "ROOT", tmp_path / "state")
    (tmp_path / "state").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.setattr(store, "project_folder", lambda _name: tmp_path / "project")
    return tmp_path / "project"


def test_file_that_grows_too_much_is_left_out_and_the_others_arrive(node: Node, tmp_path: Path) -> None:
    """Between the listing and its turn; as a checkpoint that is being saved does."""
    put(node.project, {"runs/a": "a", "runs/log": "line", "runs/z": "z"})
    found = pull(
        LocalRunner({0: LocalNode(node.home)}),
        PackRequest("p", ("runs",)),
        node=0,
        to=tmp_path / "to",
        progress=lambda *_: os.truncate(node.project / "runs/log", 3 << 30),
    )
    assert found.notes == (
        "left out runs/log: it has grown too much since it was listed; repeat the command",
    )
    assert sorted(path.name for path in (tmp_path / "to/runs").iterdir()) == ["a", "z"]


def test_copies_that_are_moved_aside_stay_copies(project: Path) -> None:
    put(project, {"dcp/a": "1", "dcp/b": "2", "dcp2/c": "3", "x": "4"})
    infos = {name: (project / name).stat() for name in ("dcp/a", "dcp2/c", "x")}
    records.keep_copies(
        project,
        {name: Writer("i-1", "job", 0, info.st_size, info.st_mtime_ns) for name, info in infos.items()},
    )
    assert set_aside(project, ["dcp", "x"]) == ["dcp", "x"]
    (moved,) = (project / REPLACED).iterdir()
    known = records.results(project)
    writers = {
        name: known.origin(str((place / name).relative_to(project)), (place / name).lstat())
        for name, place in {"dcp/a": moved, "dcp/b": moved, "x": moved, "dcp2/c": project}.items()
    }
    assert writers == {"dcp/a": "i-1", "dcp/b": "", "x": "i-1", "dcp2/c": "i-1"}


def test_search_that_takes_long_is_not_taken_for_a_complete_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shared is searched to its end; whether jobs wrote anything is not known, so they did."""
    put(node.project, {f"old{number}/x": "" for number in range(5)})
    node.start(WRITE + "write('runs/model.pt')", job="job-1")
    assert node.follow("job-1").state.phase is JobPhase.SUCCEEDED
    monkeypatch.setattr(store, "ROOT", node.home / ".cloudddp")
    monkeypatch.setattr(store, "project_folder", lambda _name: node.project)
    clock = itertools.count(step=1000)
    monkeypatch.setattr(scan, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found, _ = offers.of_node(SnapshotSearch("p", (), limit=1 << 20))
    assert [one.path for one in found.files] == ["runs/model.pt"]
    (node.project / "runs/model.pt").unlink()
    assert scan.was_written_by_jobs(node.project)


def test_data_that_is_there_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("data")
    os.utime(tmp_path / "a", (5, 5))
    monkeypatch.setattr(download, "SPARE", sys.maxsize)
    download._copy(None, "bucket", [download.Object("set/a", "a", 4, 5)], str(tmp_path), "s3://bucket/set")
    with pytest.raises(download.Refused, match="4 bytes are needed"):
        download._copy(
            None, "bucket", [download.Object("set/a", "a", 4, 6)], str(tmp_path), "s3://bucket/set"
        )
