"""`stacks`, and jobs that stall, on two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness import wait_for
from support.jobs import direct, newest, written

pytestmark = pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")

HANG = """
import os, time
def load_batch():
    time.sleep(600)
def wait_for_others(pipe):
    os.read(pipe, 1)
print('began', flush=True)
load_batch() if os.environ["RANK"] == "1" else wait_for_others(os.pipe()[0])
"""
SENTENCE = "rank 0 is in wait_for_others (hang.py:6); rank 1 is in load_batch (hang.py:4)"


def test_stacks_of_a_running_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hang.py", HANG)
    cli.ok("launch", "-d", "hang.py")
    written(cli, "began")
    shown = cli.ok("stacks")
    assert shown.splitlines()[0] == SENTENCE
    assert "rank 1 on node 1:" in shown
    found = json.loads(cli.ok("stacks", "--json"))
    assert found["summary"] == SENTENCE
    assert [(one["rank"], one["node"], one["function"]) for one in found["ranks"]] == [
        (0, 0, "wait_for_others"),
        (1, 1, "load_batch"),
    ]
    cli.ok("cancel")
    assert "(cancelled): no rank runs, and none has left a dump" in cli.fails(1, "stacks")


IDLE = """
import os, time
while True:
    if os.path.exists("go"):
        print("step", flush=True)
    time.sleep(0.2)
"""


def going_on(cli: Any) -> dict[str, Any]:
    """Return the newest job, which must not have ended."""
    job = newest(cli)
    assert job["state"] in ("starting", "running"), f"{job}\n{cli('logs').stdout}"
    return job


def test_stall_that_is_left_alone_is_shown_until_the_job_goes_on(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("idle.py", IDLE)
    words = ("launch", "-d", "--stall-minutes", "0.1", "--on-stall", "leave", "idle.py")
    cli.ok(*words, CLOUDDDP_HEARTBEAT="2")
    wait_for(lambda: going_on(cli)["stall"], "the job has stalled")
    job = newest(cli)
    assert (job["state"], job["stall"]["until"]) == ("running", None)
    assert "no output, CPU or GPU activity of any rank for 6 s" in job["stall"]["detail"]
    shown = cli("jobs")
    assert "running, stalled" in shown.stdout
    for text in (shown.stderr, cli("logs").stderr):
        assert f"job {job['id']} stalled" in text
        assert "was left alone (on_stall = leave)" in text
        assert f"cloudddp cancel {job['id']}" in " ".join(text.split())
    cli.ok("exec", "--", "touch ~/project/go")
    wait_for(lambda: going_on(cli)["stall"]["until"], "it goes on")
    assert "stalled" not in cli("jobs").stdout + cli("jobs").stderr + cli("logs").stderr
    cli.ok("cancel")
