"""Who may change the project's files on a node, and what a job that finds others than it was launched with
does."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agentnode import gang_of, new_mark
from support.localsync import LocalCluster, put

from agent.files import project_lock
from agent.jobs import phases
from agent.node import processes, store
from cloudddp.agent import client
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.jobs import KillRequest, StateFile
from cloudddp.agent.protocol.machine import ProbeRequest
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process, StartRequest, Work
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
    probes = probe(synced.runner, cluster, ProbeRequest(PROJECT, "", manifest_digest=files.digest))
    (node,) = sync.launch_nodes(cluster, probes)
    sync.update(synced.runner, [node], files, lambda _text: None, max_mb=Config().sync.max_mb, job=job)
    return node.version


def start(synced: LocalCluster, job: str, version: int) -> None:
    rank = Process((), (sys.executable, "train.py"), {"RANK": "0"})
    work = Work("train.py", {}, (rank,), 1, 0, 1.0)
    request = StartRequest(job, 0, PROJECT, gang_of(1), work, version=version)
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


OWN, JOB = os.getppid(), "20260101-000000-abcd"


def write_lease(*, born: str = "", age: float = 0.0) -> None:
    lease = project_lock._Lease(JOB, OWN, born or processes.born(OWN), time.monotonic() - age)
    (store.ROOT / "sync-project.lock").write_bytes(encode(lease))


def write_setup(ended: float | None, exit_code: int | None) -> None:
    born = processes.born(OWN)
    phase = JobPhase.FAILED if exit_code else JobPhase.SETUP
    setup = StateFile(JOB, 0, phase, 1.0, ended, exit_code, pid=OWN, born=born, script="x")
    store.write(store.job_folder(JOB) / phases.STATE_FILE, setup)


# What has become of a launch whose sync has ended -> whether another one may change the files.
LEASES: dict[str, tuple[bool, Callable[[], object]]] = {
    "it is about to start": (False, write_lease),
    "the job has started": (True, lambda: (store.job_folder(JOB) / phases.JOB_FILE).touch()),
    "its setup runs": (False, lambda: write_setup(None, None)),
    "its setup has failed": (True, lambda: write_setup(time.time(), 1)),
    "the laptop is gone": (True, lambda: write_lease(born="1")),
    "nothing has followed for a minute": (True, lambda: write_lease(age=project_lock.LEASE + 1)),
    "the file was damaged": (True, lambda: (store.ROOT / "sync-project.lock").write_bytes(b"{")),
}


@pytest.mark.parametrize("case", LEASES)
def test_lease_of_a_launch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(store, "ROOT", tmp_path / ".cloudddp")
    project = tmp_path / "project"
    store.create_root()
    store.job_folder(JOB).mkdir(parents=True)
    with project_lock.held(project) as lock:
        lock.changes()
        version = lock.version
        lock.lease(JOB)
        assert lock.version == version
    is_free, happens = LEASES[case]
    happens()
    with project_lock.held(project, within=0.0, unless_leased=JOB):
        pass
    refused = pytest.raises(SystemExit, match=f"the launch of job {JOB} owns the project's files")
    with (
        contextlib.nullcontext() if is_free else refused,
        project_lock.held(project, within=0.0, unless_leased=""),
    ):
        pass
