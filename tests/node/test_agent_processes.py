"""Which processes count as a job's: a mistake here would end processes of others."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import alive, environ, until

from agent.node import processes
from agent.node.processes import Task, born, find
from cloudddp.agent.protocol import TASK_VARIABLE

SLEEP = shutil.which("sleep") or ""
FORK = multiprocessing.get_context("fork")
MARK = f"test-processes-{os.getpid()}/0"


@pytest.fixture
def marked() -> Iterator[int]:
    """A process of the task."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, TASK_VARIABLE: MARK}) as process:
        environ(process.pid)
        yield process.pid
        process.kill()


@pytest.fixture
def unmarked() -> Iterator[int]:
    """A child of this process that does not belong to the task."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def task(folder: Path, record: object) -> Task:
    path = folder / "state.json"
    path.write_text(json.dumps(record))
    return Task(MARK, path)


RECORDS = [
    {"pid": 1, "born": born(1)},
    *({"pid": pid, "born": ""} for pid in (0, -1, 2**22 + 1, None, os.getpid())),
    {"pid": os.getpid(), "born": "0"},
    {"pid": os.getpid(), "born": "9" * 30},
    {},
    [],
]


def test_record_that_names_no_supervisor_adds_no_process(tmp_path: Path, marked: int, unmarked: int) -> None:
    """Not init, not an ended process, and not one that was born earlier or later."""
    for record in RECORDS:
        assert find(task(tmp_path, record)) == [marked], record


def test_descendants_of_the_leader_belong_to_the_task(tmp_path: Path) -> None:
    command = 'env -i setsid sh -c "sleep 600 & wait" & wait'
    leader = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    found: list[int] = []
    try:
        record = task(tmp_path, {"pid": leader.pid, "born": born(leader.pid)})
        found += until(lambda: len(pids := find(record)) >= 2 and pids, seconds=5.0)
        assert leader.pid not in found
        assert os.getpid() not in found
        assert processes.end(record, grace=5.0, children=[leader])[1] == 0
        assert find(record) == []
    finally:
        for pid in (*found, leader.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.wait()


def test_mark_of_another_task_does_not_count(tmp_path: Path, marked: int) -> None:
    assert marked not in find(Task(MARK + "/setup", tmp_path / "none"))
    assert marked not in find(Task(MARK[:-1] + "1", tmp_path / "none"))
    assert marked not in find(Task(MARK[:-1], tmp_path / "none"))  # as node 1's of node 10
    assert MARK.split("/")[0] in [job for job, _ in processes.marked_jobs()]


def test_zombie_counts_as_ended(tmp_path: Path) -> None:
    """In a container without an init nobody collects them."""
    with subprocess.Popen(["sh", "-c", "echo $$ & exec sleep 600"], stdout=subprocess.PIPE) as leader:
        try:
            record = task(tmp_path, {"pid": leader.pid, "born": born(leader.pid)})
            children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children")
            zombie = int(until(children.read_text))
            until(lambda: not alive(zombie))
            assert born(zombie) == ""
            assert find(record) == []
            assert Path(f"/proc/{zombie}").exists()
        finally:
            leader.kill()


def test_process_that_has_ended_has_no_birth_and_no_parent() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert born(process.pid) == ""
    assert processes.parent(process.pid) is None


@pytest.mark.parametrize("name", ["a) Z 1 (b", "学習プログラム"])
def test_process_may_have_any_name(tmp_path: Path, name: str) -> None:
    """The kernel cuts names at 15 bytes, possibly in the middle of a character."""
    program = tmp_path / name
    shutil.copy(SLEEP, program)
    with subprocess.Popen([program, "600"], env={TASK_VARIABLE: MARK}) as process:
        try:
            until(lambda: name[:3].encode() in Path(f"/proc/{process.pid}/stat").read_bytes())
            environ(process.pid)  # execve() sets the name first
            assert find(Task(MARK, tmp_path / "none")) == [process.pid]
            assert processes.parent(process.pid) == os.getpid()
        finally:
            process.kill()


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The calls of a sudo that asks for a password, one on each line, in a folder that every user can write
    to."""
    with tempfile.TemporaryDirectory() as folder:
        calls, program = Path(folder, "calls"), Path(folder, "sudo")
        calls.touch()
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\nexit 1\n')
        for path, mode in ((calls.parent, 0o777), (calls, 0o666), (program, 0o755)):
            path.chmod(mode)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield calls


@pytest.mark.skipif(os.getuid() != 0, reason="needs processes of two users")
def test_process_of_another_user_counts_as_left_when_sudo_fails(
    sudo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GIVE_UP_SECONDS", 0.5)
    results: multiprocessing.SimpleQueue[tuple[int, int]] = FORK.SimpleQueue()

    def end_as_another_user() -> None:
        os.setuid(65534)
        results.put(processes.end(record, grace=0.5))

    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as leader:
        try:
            record = task(sudo.parent, {"pid": leader.pid, "born": born(leader.pid)})
            (child,) = until(lambda: find(record), seconds=5.0)
            ending = FORK.Process(target=end_as_another_user)
            ending.start()
            ending.join(10)
            ending.kill()
            ending.join()
            assert not results.empty(), "end() did not give up"
            assert results.get() == (1, 1)
            assert alive(child)
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
    first, *later = sudo.read_text().splitlines()
    assert first == f"-n kill -15 {child}"
    assert set(later) == {f"-n kill -9 {child}"}
