"""The training status, from the file that rank 0 writes to what the commands show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.harness import wait_for
from support.jobs import newest

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


@pytest.fixture
def one_node(cli: Any) -> Any:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="60")
    cli.nodes(1)
    return cli


def test_training_status_is_shown(one_node: Any) -> None:
    cli = one_node
    cli.write("work.py", REPORT + "report(state='running', step=12, steps=30)\ntime.sleep(600)\n")
    cli.ok("launch", "-d", "work.py")
    wait_for(lambda: json.loads(cli.ok("jobs", "--json"))[0]["training"], "the job reports")
    training = json.loads(cli.ok("jobs", "--json"))[0]["training"]
    assert training.pop("reported").endswith("+00:00")
    assert training == {"state": "running", "step": 12, "steps": 30, "best_accuracy": None}
    assert "step 12 of 30" in cli.ok("jobs")
    assert "the training last reported step 12 of 30" in cli.messages("cancel")
    ended = cli.fails(130, "logs", "-f")
    assert "cancelled: cancelled" not in ended
    assert "the training last reported step 12 of 30" in ended


def test_exit_code_overrides_the_reported_state(one_node: Any) -> None:
    """A job that saved a snapshot after SIGTERM is preempted."""
    cli = one_node
    cli.write(
        "work.py", REPORT + "report(state=sys.argv[1], step=12, steps=30)\nsys.exit(int(sys.argv[2]))\n"
    )
    for state, code, expected in (
        ("failed", 0, "succeeded"),
        ("preempted", 143, "preempted"),
    ):
        done = cli.exits(code, "launch", "work.py", state, str(code))
        assert newest(cli)["state"] == expected
    assert "preempted: its ranks were asked to stop (SIGTERM)" in done.stderr
    assert "the training stopped after step 12 of 30, with a snapshot" in done.stderr
    assert "step 12 of 30, snapshot saved" in cli.ok("jobs")
