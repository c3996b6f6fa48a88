"""Who may change the project's files on a node, and what a job that finds others than it was launched with
does."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest
from support.agentnode import gang_of, new_mark
from support.localsync import LocalCluster, put

from agent.files import project_lock
from agent.jobs import phases
from agent.node import processes, store
from cloudddp.agent import client
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.jobs import KillRequest
from cloudddp.agent.protocol.start import Process, StartRequest
from cloudddp.cluster.connect import PROJECT, probe
from cloudddp.config.spec import Config
from cloudddp.errors import NodeError
from cloudddp.job import project_files, sync

CHANGED = "another launch or sync has changed the project's files on this node meanwhile; repeat the command"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    put(tmp_path / "one", {"train.py": "import time; time.sleep(600)", "data": "1"})
    return tmp_path / "one"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    put(tmp_path / "two", {"train.py": "print(2)"})
    return tmp_path / "two"


def send(synced: LocalCluster, here: Path, job: str = "") -> int:
    """Sync as the launch of `job` does; return the version of the project."""
    files, cluster = project_files.of_config(here, Config()), synced.cluster
    probes = probe(synced.runner, cluster, manifest=files.digest)
    versions = sync.update(synced.runner, cluster, probes, Config(), files, lambda _text: None, job=job)
    return versions[0]


def start(synced: LocalCluster, job: str, version: int) -> None:
    rank = Process((), (sys.executable, "train.py"), {"RANK": "0"})
    request = StartRequest(job, 0, PROJECT, "train.py", {}, (rank,), 1, 0, 1.0, gang_of(1), version=version)
    client.call(synced.runner, 0, request)


def test_job_does_not_start_with_other_files(synced: LocalCluster, one: Path, two: Path) -> None:
    """Also if its launch has found that its own are on the node."""
    job = f"{new_mark()}-0000"
    version = send(synced, one)
    assert send(synced, one) == version
    send(synced, two)
    with pytest.raises(NodeError, match=CHANGED):
        start(synced, job, version)
    assert not (synced.home / ".cloudddp" / "jobs" / job).exists()


def test_files_that_were_compared_with_those_of_an_earlier_sync_are_not_mixed(
    synced: LocalCluster, one: Path, two: Path
) -> None:
    synced.sync(one)
    put(one, {"new.py": "1"})

    def other() -> None:
        synced.runner.on_probed = lambda: None
        send(synced, two)

    synced.runner.on_probed = other
    with pytest.raises(NodeError, match=CHANGED):
        send(synced, one)
    assert sorted(path.name for path in synced.project.iterdir()) == ["train.py"]
    assert (synced.project / "train.py").read_text() == "print(2)"


def test_launch_changes_no_file_of_a_job_that_has_started_since_it_looked(
    synced: LocalCluster, one: Path, two: Path
) -> None:
    job = f"{new_mark()}-0000"
    start(synced, job, send(synced, one, job))
    try:
        with pytest.raises(NodeError, match=f"job {job} runs on this node"):
            send(synced, two, f"{new_mark()}-0000")
        assert (synced.project / "data").read_text() == "1"
        send(synced, two)  # `cloudddp sync` may
        assert not (synced.project / "data").exists()
    finally:
        client.call(synced.runner, 0, KillRequest(job, 0.0, "0" * 16))


OWN = os.getppid()


@pytest.mark.parametrize(
    ("case", "is_free"),
    [
        ("it is about to start", False),
        ("the job has started", True),
        ("its setup runs", False),
        ("its setup has failed", True),
        ("the laptop is gone", True),
        ("nothing has followed for a minute", True),
        ("the file was damaged", True),
    ],
)
def test_lease_of_a_launch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, is_free: bool
) -> None:
    monkeypatch.setattr(store, "ROOT", tmp_path / ".cloudddp")
    project, job = tmp_path / "project", "20260101-000000-abcd"
    store.create_root()
    folder = store.job_folder(job)
    folder.mkdir(parents=True)
    with project_lock.held(project) as lock:
        lock.changes()
        version = lock.version
        lock.lease(job)
        assert lock.version == version
    if case == "the job has started":
        (folder / phases.JOB_FILE).touch()
    elif "setup" in case:
        runs = case == "its setup runs"
        ended = None if runs else time.time()
        own = phases.SetupFile(job, 0, "x", 1.0, OWN, processes.born(OWN), ended, None if runs else 1)
        store.write(folder / phases.SETUP_FILE, own)
    elif case != "it is about to start":
        born = "1" if case == "the laptop is gone" else processes.born(OWN)
        old = project_lock._Lease(job, OWN, born, time.monotonic() - project_lock.LEASE - 1)
        data = b"{" if case == "the file was damaged" else encode(old)
        (store.ROOT / "sync-project.lock").write_bytes(data)
    with project_lock.held(project, within=0.0, unless_leased=job):
        pass
    refused = pytest.raises(SystemExit, match=f"the launch of job {job} owns the project's files")
    with (
        contextlib.nullcontext() if is_free else refused,
        project_lock.held(project, within=0.0, unless_leased=""),
    ):
        pass
