"""Which processes count as a job's: a mistake here would end processes of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import processes
from agent.processes import Task, born, find
from cloudddp.agent.protocol import TASK_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

MARK = f"test-processes-{os.getpid()}/0"


@pytest.fixture
def marked() -> Iterator[int]:
    """A process of the task."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, TASK_VARIABLE: MARK}) as process:
        yield process.pid
        process.kill()


def task(folder: Path, record: object) -> Task:
    path = folder / "state.json"
    path.write_text(json.dumps(record))
    return Task(MARK, path)


@pytest.mark.parametrize(
    "record",
    [
        {"pid": 1, "born": born(1)},
        {"pid": 0, "born": ""},
        {"pid": -1, "born": ""},
        {"pid": 2**22 + 1, "born": ""},
        {"pid": os.getpid(), "born": "1"},
        {"pid": os.getpid(), "born": ""},
        {"pid": None, "born": ""},
        {},
        [],
    ],
    ids=["init", "0", "-1", "no process", "other start", "no start", "null", "empty", "a list"],
)
def test_record_that_names_no_supervisor_adds_no_process(tmp_path: Path, marked: int, record: object) -> None:
    assert find(task(tmp_path, record)) == [marked]


def test_descendants_of_the_leader_belong_to_the_task(tmp_path: Path) -> None:
    command = 'env -i sh -c "sleep 600 & wait" & wait'
    with subprocess.Popen(["sh", "-c", command], start_new_session=True) as leader:
        record = task(tmp_path, {"pid": leader.pid, "born": born(leader.pid)})
        while len(found := find(record)) < 2:
            assert leader.poll() is None
        assert leader.pid not in found
        assert os.getpid() not in found
        assert processes.end(record, grace=5.0, children=[leader])[1] == 0
        assert find(record) == []


def test_mark_of_another_task_does_not_count(tmp_path: Path, marked: int) -> None:
    assert marked not in find(Task(MARK + "/setup", tmp_path / "none"))
    assert marked not in find(Task(MARK[:-1] + "1", tmp_path / "none"))
    assert processes.any_of_job(MARK.split("/")[0])
    assert not processes.any_of_job(MARK.split("/")[0][:-1])
