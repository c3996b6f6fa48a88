"""The planned end of nodes (`launch --down`): it comes whatever fails, and never while a job runs or is
resumed."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, interrupt, no_capacity, wait_for
from support.jobs import newest, written

SCALE = 0.1
MINUTE = 60 * SCALE  # seconds
TOML = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nheartbeat = 4\n'
# Runs until `enough` exists on its node.
COUNT = """
import os, time
print('began', os.environ['RANK'], flush=True)
while not os.path.exists('enough'): time.sleep(0.05)
"""
# Takes each block of the disk that becomes free, for a while.
HOG = """
import os, time
taken, end = os.open('taken', os.O_CREAT | os.O_WRONLY | os.O_APPEND), time.monotonic() + 40
while time.monotonic() < end:
    try: os.write(taken, bytes(4096))
    except OSError: time.sleep(0.0005)
"""


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    """A cluster whose minutes are short, with two nodes."""
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("count.py", COUNT)
    lab_cli.write("short.py", "")
    lab_cli.env["CLOUDDDP_TIME_SCALE"] = str(SCALE)
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    return lab_cli


def ended(cli: CommandLine, ec2: Any) -> None:
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def test_end_is_put_off_for_a_replacement_and_restored_without_one(cli: CommandLine) -> None:
    cli.ok("launch", "-d", "--down", "--keep", "5", "count.py")
    written(cli, "began", job=newest(cli)["id"])
    cli.ok("sim", "fault", "kill", "1")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
    with no_capacity(cli):
        done = cli("resume", "-d")
        assert done.returncode == 1
        assert re.search(r"the nodes that are left end by themselves in (59|60) s", done.stderr), done.stderr
        process = cli.start("resume", "-d", "--wait-capacity", "10m")
        planned = newest(cli)["nodes_end"]
        wait_for(lambda: newest(cli)["nodes_end"] > planned, "the end of the nodes is put off")
        time.sleep(6 * MINUTE)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    wait_for(lambda: newest(cli)["state"] == "running", "the job runs again")
    assert newest(cli)["nodes_end"] is None
    assert newest(cli)["nodes_end_after_seconds"] == 5 * MINUTE
    cli.ok("cancel")


def test_node_without_a_guard_ends(cli: CommandLine, ec2: Any) -> None:
    """The guard and its supervisor are killed while the job runs, and while it waits to power off."""
    cli.ok("launch", "-d", "--down", "--keep", "1", "count.py")
    wait_for(lambda: newest(cli)["state"] == "running", "the job runs")
    cli.ok("exec", "--node", "1", "--", "pkill -KILL -x cloudddp-job")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
    cli("exec", "--node", "0", "--", "pkill -KILL -x cloudddp-wait")
    ended(cli, ec2)


def test_running_job_keeps_its_nodes(cli: CommandLine, ec2: Any) -> None:
    cli.ok("launch", "-d", "--down", "--keep", "1", "count.py")
    wait_for(lambda: newest(cli)["state"] == "running", "the job runs")
    time.sleep(5 * MINUTE)
    assert len(instances_of(ec2, cli.cluster)) == 2
    assert newest(cli)["state"] == "running"
    job = newest(cli)["id"]
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert (cluster["ends_after_job"], cluster["ends_after_job_minutes"]) == (job, 1)
    assert f"after the end of job {job}, which ends its nodes (--down)" in cli.ok("status")
    cli.ok("exec", "--", "touch enough")
    ended(cli, ec2)
    for verb in ("jobs", "logs", "pull", "status"):
        done = cli(verb)
        assert done.returncode == 1
        assert (
            f"{cluster['cluster_id']}, ended: its nodes powered off by themselves (job {job} was launched "
            "with --down" in done.stderr
        )
        assert "results that were not pulled from them are lost" in done.stderr


def test_nodes_end_whatever_ends_the_setup(cli: CommandLine, ec2: Any) -> None:
    """A command that fails, an interrupt, or the end of the client."""
    launch = ("launch", "-d", "--down", "--keep", "1", "short.py")
    cli.write("cloudddp.toml", TOML + '[setup]\nrun = ["false"]\n')
    done = cli(*launch)
    assert done.returncode == 1
    # At least ten minutes, in which the user can start it again.
    assert re.search(r"not started; the nodes end by themselves in ((59|60) s|1 min 00 s)", done.stderr), (
        done.stderr
    )
    cli.write("cloudddp.toml", TOML + '[setup]\nrun = ["sleep 1000"]\n')
    process = cli.start(*launch)
    sleeping = ("exec", "--", "pgrep -x sleep || true")
    wait_for(lambda: cli.ok(*sleeping).count("[node ") == 2, "the setup runs")
    code, _, err = interrupt(process)
    assert code == 130
    assert "the nodes end by themselves in" in err, err
    process = cli.start(*launch)
    wait_for(lambda: cli.ok(*sleeping).count("[node ") == 2, "the setup runs")
    process.kill()
    process.wait()
    sooner = 'sed -i \'s/"seconds": *[0-9.]*/"seconds": 2.0/\' ~/.cloudddp/poweroff.json'
    cli.ok("exec", "--", sooner)  # instead of the hour that a setup may take
    ended(cli, ec2)


def test_nodes_stay_after_a_stall_for_the_minutes_of_keep(cli: CommandLine, ec2: Any) -> None:
    cli.write("hang.py", "import time; print('began', flush=True); time.sleep(1000)")
    cli.write("cloudddp.toml", TOML + 'stall_minutes = 0.1\non_stall = "down"\n')
    cli.ok("launch", "-d", "--keep", "3", "hang.py")
    wait_for(lambda: newest(cli)["nodes_end"], "the end of the nodes is planned")
    assert "stalled (on_stall = down)" in cli("jobs").stderr
    assert "began" in cli.ok("logs")
    ended(cli, ec2)
    assert "on_stall = down" in cli("jobs").stderr


def left(cli: CommandLine) -> float:
    """Return in how many seconds the nodes end because of --down."""
    ends = wait_for(lambda: newest(cli)["nodes_end"], "the end of the nodes is planned")
    return (datetime.fromisoformat(ends) - datetime.now(UTC)).total_seconds()


def test_end_is_put_off_by_a_job_only(cli: CommandLine, ec2: Any) -> None:
    """`watch` may be started by cron: each call puts off the end, and restores it."""
    cli.write("fails.py", "raise SystemExit(3)\n")
    cli.ok("launch", "-d", "--down", "--keep", "8", "fails.py")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
    assert left(cli) <= 8 * MINUTE
    assert cli("watch").returncode == 3
    assert left(cli) <= 8 * MINUTE
    cli.ok("launch", "-d", "--down", "--keep", "8", "short.py")
    wait_for(lambda: newest(cli)["state"] == "succeeded", "the job has ended")
    assert "there is nothing to resume" in cli("resume").stderr
    assert left(cli) <= 8 * MINUTE
    assert re.search(r"the nodes end in \d+ s.* launched with --down", cli("jobs").stderr)
    cli.ok("launch", "short.py")
    assert {one["nodes_end"] for one in json.loads(cli.ok("jobs", "--json"))} == {None}
    cli.ok("launch", "-d", "--down", "--keep", "4", "short.py")
    wait_for(lambda: newest(cli)["nodes_end"], "the end of the nodes is planned")
    cli.ok("sim", "fault", "cut-between", "0", "1")
    done = cli("launch", "count.py")
    assert done.returncode == 1
    assert "the nodes end by themselves in" in done.stderr, done.stderr
    assert "an earlier job was launched with --down" in done.stderr
    ended(cli, ec2)


def test_node_whose_disk_stays_full_ends(cli: CommandLine, ec2: Any) -> None:
    """A program takes each block that becomes free. It is not of the job, and ends by itself."""
    cli.write("hog.py", HOG)
    cli.write("fails.py", "import time\nprint('began', flush=True)\ntime.sleep(6)\nraise SystemExit(5)\n")
    job = cli.ok("launch", "-d", "--down", "--keep", "3", "fails.py").strip()
    written(cli, "began")
    cli.ok(
        "exec", "--node", "0", "--", "cd ~/project && (setsid python3 hog.py < /dev/null > /dev/null 2>&1 &)"
    )
    cli.ok("sim", "fault", "fill-disk", "0")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
    assert newest(cli)["exit_code"] == 5
    assert newest(cli)["cause"].startswith("rank ")
    assert newest(cli)["id"] == job
    ended(cli, ec2)
