"""`stacks`, and jobs that stall, on two nodes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness import wait_for
from support.jobs import direct, written

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
    unknown = cli("stacks", "20200101-000000-dead")
    assert unknown.returncode == 1
    assert "not found" in unknown.stderr
    cli.ok("cancel")
    ended = cli("stacks")
    assert ended.returncode == 1
    assert "has ended (cancelled)" in ended.stderr


def test_rank_that_has_exited_with_0_is_named(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hang.py", HANG.replace("print(", "if os.environ['RANK'] == '1': raise SystemExit(0)\nprint("))
    cli.ok("launch", "-d", "hang.py")
    exited = wait_for(lambda: json.loads(cli.ok("stacks", "--json"))["exited"], "rank 1 has exited")
    ((rank, node, code),) = [(one["rank"], one["node"], one["exit_code"]) for one in exited]
    assert (rank, node, code) == (1, 1, 0)
    at = exited[0]["ended"][11:19]
    first = cli.ok("stacks").splitlines()[0]
    assert first == f"rank 1 exited with 0 at {at} UTC; rank 0 is in wait_for_others (hang.py:6)"
    follower = cli.start("logs", "-f", CLOUDDDP_TIME_SCALE="0.05")
    assert follower.stderr is not None
    line = wait_for(lambda: follower.stderr.readline(), "silence is reported")
    assert f"rank 1 exited with 0 at {at} UTC. " in line
    cli.ok("cancel")
    follower.communicate()


def test_stalled_job_fails_with_the_line_of_the_rank(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hang.py", HANG)
    done = cli("launch", "--stall-minutes", "0.05", "hang.py", CLOUDDDP_HEARTBEAT="2")
    assert done.returncode == 1
    assert (
        f"the job has stalled: no output, CPU or GPU activity of any rank for 3 s; {SENTENCE}" in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stall-minutes", "0.2"), "is below job.heartbeat = 15 s"),
        (("--stall-minutes", "-1"), "job.stall_minutes = '-1' is not allowed"),
        (("--on-stall", "restart"), "needs job.retries"),
        (("--on-stall", "sleep"), "job.on_stall = 'sleep' is not allowed"),
    ],
)
def test_invalid_settings_are_usage_errors(cli: Any, words: tuple[str, ...], message: str) -> None:
    cli.write("hang.py", HANG)
    done = cli("launch", *words, "hang.py")
    assert done.returncode == 2
    assert message in done.stderr


def test_launch_puts_py_spy_on_each_node_once(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "print('done')\n")
    first = cli("launch", "ok.py", CLOUDDDP_STALL_MINUTES="0")
    assert (first.returncode, "py-spy" in first.stderr) == (0, False)
    first, second = cli("launch", "ok.py"), cli("launch", "ok.py")
    assert (first.returncode, second.returncode) == (0, 0)
    assert "sending py-spy to 2 nodes" in first.stderr
    assert "py-spy" not in second.stderr
    digest = hashlib.sha256(Path(sys.executable).with_name("py-spy").read_bytes()).hexdigest()
    assert cli.ok("exec", "--", "sha256sum ~/.cloudddp-tools/py-spy").count(digest) == 2
