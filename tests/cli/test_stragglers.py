"""What `jobs` and `logs` show of stragglers, and of a stall that was left alone."""

from __future__ import annotations

from typing import Any

from support.harness import wait_for
from support.jobs import direct, lines_by_rank, newest

STEPS = """
import json, os, time
step, rank = 0, int(os.environ["RANK"])
while not os.path.exists("done"):
    step += 1
    path = os.environ["CLOUDDDP_STEP_FILE"]
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "work_seconds": 0.05 if rank == 1 and not os.path.exists("well") else 0.02}, file)
    os.replace(path + ".tmp", path)
    time.sleep(0.05)
"""  # noqa: E501
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


def test_straggler_is_named_in_jobs_and_in_the_log_with_nobody_connected(cli: Any) -> None:
    direct(cli, nodes=1, ranks=3)
    cli.write("steps.py", STEPS)
    cli.ok("launch", "-d", "steps.py")
    wait_for(lambda: going_on(cli)["stragglers"], "rank 1 is a straggler")
    (found,) = newest(cli)["stragglers"]
    assert (found["rank"], found["node"], found["times_median"], found["measured"]) == (1, 0, 2.5, "work")
    assert (found["seconds_per_step"], found["median_seconds_per_step"]) == (0.05, 0.02)
    assert found["since_step"] >= 1
    assert found["until"] is None
    shown = cli("jobs")
    assert "straggler: rank 1 (2.5 x)" in shown.stdout
    assert "rank 1 takes 2.5 x as long as the median rank" in shown.stderr
    logs = lines_by_rank(cli.ok("logs"))
    assert [rank for rank, lines in logs.items() if any("straggler" in line for line in lines)] == [1]

    cli.ok("exec", "--", "touch ~/project/well")
    wait_for(lambda: going_on(cli)["stragglers"][0]["until"], "rank 1 has caught up")
    assert "straggler" not in cli.ok("jobs")
    (first, second) = lines_by_rank(cli.ok("logs"))[1]
    assert "rank 1 takes 2.5 x as long" in first
    assert "rank 1 has caught up" in second


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
