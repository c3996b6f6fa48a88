"""Agents of two versions on one node: the store of another one is taken over while no job runs, else
refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support.agentnode import Node, Refused, environ, gang_of

from agent.node.processes import born
from cloudddp.agent.protocol import TASK_VARIABLE, VERSION, ExitCode
from cloudddp.agent.protocol.file_steps import PackRequest, ReceiveRequest
from cloudddp.agent.protocol.jobs import JobsRequest, KillRequest
from cloudddp.agent.protocol.machine import ProbeRequest
from cloudddp.agent.protocol.phases import JobPhase, VersionConflict
from cloudddp.agent.protocol.results import NewFilesRequest, PulledRequest
from cloudddp.agent.protocol.start import Process, SetupRequest, StartRequest, Work
from cloudddp.agent.replies import decode


class VersionOne:
    """Writes the files of agent version 1, which recorded no version."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._started: list[subprocess.Popen[bytes]] = []

    def job(self, name: str, *, pid: int, **state: Any) -> None:
        folder, job = self.node.folder(name), self.node.id(name)
        (folder / "ranks").mkdir(parents=True)
        ended = {"ended": None, "exit_code": None, **state}
        known = {"job": job, "node": 0, "state": "running", "started": 1000.0, "error": "", "restarts": 0}
        own = {"pid": pid, "born": born(pid), "script": "script.py", "expected": 1}
        rank = {"rank": 0, "local_rank": 0, "started": 1001.0, "signal": None, "attempt": 0, "pid": 2**22 + 1}
        records = {
            "job.json": {"job": job, "node": 0, "project": "p", "script": "script.py", "ranks": 1},
            "state.json": {**known, **own, **ended},
            "ranks/0.json": {**rank, "ended": ended["ended"], "exit_code": ended["exit_code"]},
        }
        for path, record in records.items():
            (folder / path).write_text(json.dumps(record))
        (folder / "ranks" / "0.log").write_text("from version 1\n")

    def running(self, name: str = "job-1") -> subprocess.Popen[bytes]:
        """Return the process that stands for the supervisor of a job that runs."""
        supervisor = self.process()
        self.job(name, pid=supervisor.pid)
        return supervisor

    def ended(self, name: str = "job-1") -> None:
        supervisor = self.process()
        self.job(name, pid=supervisor.pid, state="failed", ended=1002.0, exit_code=7)
        supervisor.kill()
        supervisor.wait()

    def process(self, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"], env={**os.environ, **env})
        environ(process.pid)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def version_one(node: Node) -> Iterator[VersionOne]:
    found = VersionOne(node)
    yield found
    found.close()


def recorded(node: Node) -> str:
    return (node.store / "version").read_text()


def every_request(node: Node) -> list[Any]:
    job = node.id("job-2")
    return [
        ProbeRequest("p", "127.0.0.1"),
        ReceiveRequest("p", "s"),
        SetupRequest(job, 0, "p", "s", ("touch never",)),
        StartRequest(
            job, 0, "p", gang_of(), Work("s", {}, (Process((), ("touch", "never"), {}),), 1, 0, 1.0)
        ),
        node.following("job-1"),
        KillRequest(node.id("job-1"), 1.0, "a1"),
        JobsRequest(),
        PulledRequest("p", ("x",), 1),
    ]


def test_steps_are_refused_while_a_job_of_another_version_runs(node: Node, version_one: VersionOne) -> None:
    supervisor = version_one.running()
    before = {path: path.stat().st_mtime_ns for path in node.store.rglob("*") if path.suffix != ".lock"}
    for request in every_request(node):
        done = node.run(request)
        assert done.returncode == ExitCode.OTHER_VERSION, request
        assert done.stdout == b""
        conflict = decode(done.stderr.rstrip(), VersionConflict)
        assert conflict == VersionConflict(store=1, agent=VERSION, jobs=(node.id(),))
    assert supervisor.poll() is None
    assert not (node.project / "never").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_steps_that_only_read_files_are_never_refused(node: Node, version_one: VersionOne) -> None:
    version_one.running()
    (node.project / "model.pt").write_text("weights")
    assert node.run(PackRequest("p", ("model.pt",))).returncode == 0
    found = node.call(NewFilesRequest("p", (), ()))
    assert found.running == (node.id(),)
    assert [path.name for job in found.jobs for path in job.outputs.paths] == ["model.pt"]
    assert not (node.store / "version").exists()


def test_store_is_taken_over_once_the_job_has_ended(node: Node, version_one: VersionOne) -> None:
    version_one.ended()
    (found,) = node.jobs()
    assert (found.job, found.phase, found.exit_code) == (node.id(), JobPhase.FAILED, 7)
    assert found.ranks[0].exit_code == 7
    assert recorded(node) == f"{VERSION}\n"
    assert node.follow().logs == {0: b"from version 1\n"}
    assert node.cancel().phase is JobPhase.FAILED
    node.start("print('ran')", job="job-2")
    assert node.follow("job-2").state.phase is JobPhase.SUCCEEDED


@pytest.mark.parametrize("text", [f"{VERSION + 1}\n", ""])
def test_unreadable_job_of_an_unknown_version_is_running_while_its_processes_run(
    node: Node, version_one: VersionOne, text: str
) -> None:
    node.folder().mkdir(parents=True)
    (node.store / "version").write_text(text)
    (node.folder() / "job.json").write_text('{"another": "layout"}')
    rank = version_one.process(**{TASK_VARIABLE: f"{node.id()}/0"})
    with pytest.raises(Refused) as refused:
        node.probe()
    assert refused.value.exit_code == ExitCode.OTHER_VERSION
    rank.kill()
    rank.wait()
    node.probe()
    assert recorded(node) == f"{VERSION}\n"
