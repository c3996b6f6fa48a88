"""The training status, from the file that rank 0 writes to what the commands show."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs import direct, newest

from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus

REPORT = """
import json, os, sys, time
def report(**fields):
    if path := os.environ.get("CLOUDDDP_STATUS_FILE"):
        with open(path + ".tmp", "w") as file:
            json.dump(fields, file)
        os.replace(path + ".tmp", path)
"""


def status(**fields: Any) -> TrainingStatus:
    return TrainingStatus(**{"reported": 0.0, **fields})


@pytest.mark.parametrize(
    ("fields", "text", "stopped"),
    [
        ({"step": 0, "steps": 9}, "step 0 of 9", "last reported step 0 of 9"),
        ({"step": 7}, "step 7", "last reported step 7"),
        (
            {"state": TrainingState.PREEMPTED, "step": 7, "steps": 9, "best_accuracy": 0.5},
            "step 7 of 9, best accuracy 0.5000",
            "stopped after step 7 of 9, with a snapshot",
        ),
        ({"best_accuracy": 0.98765}, "best accuracy 0.9877", "last reported best accuracy 0.9877"),
        ({"state": TrainingState.PREEMPTED}, "", "stopped, with a snapshot"),
        ({"state": TrainingState.RUNNING}, "", ""),
    ],
)
def test_training_status_as_text(fields: dict[str, Any], text: str, stopped: str) -> None:
    assert status(**fields).text == text
    assert status(**fields).stopped == stopped


def test_status_comes_from_the_node_that_runs_rank_0() -> None:
    found = status(step=3, reported=1.5)
    assert TrainingStatus.from_replies([None, None, found]) == found
    assert TrainingStatus.from_replies([None, None]) is None


def test_job_that_saved_a_snapshot_after_sigterm_is_preempted(cli: Any) -> None:
    """tests/cli/test_top.py has the status of a job that runs."""
    direct(cli)
    cli.write(
        "work.py", REPORT + "report(state=sys.argv[1], step=12, steps=30)\nsys.exit(int(sys.argv[2]))\n"
    )
    done = cli.exits(143, "launch", "work.py", "preempted", "143")
    assert newest(cli)["state"] == "preempted"
    assert "preempted: its ranks were asked to stop (SIGTERM)" in done.stderr
    assert "the training stopped after step 12 of 30, with a snapshot" in done.stderr
    assert "step 12 of 30, snapshot saved" in cli.ok("jobs")
