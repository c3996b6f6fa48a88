"""The end of nodes after a job (`launch --down`): it comes whatever fails, and never while the job runs or is
resumed."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from support.harness import CommandLine, finished, instances_of, no_capacity, wait_for
from support.jobs import newest, written
from test_resume import COUNT

SCALE = 0.15
MINUTE = 60 * SCALE  # seconds
TOML = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nheartbeat = 4\n'


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


def test_nodes_stay_while_others_are_replaced(cli: CommandLine) -> None:
    cli.ok("launch", "-d", "--down", "--keep", "5", "count.py")
    written(cli, "began", job=newest(cli)["id"])
    cli.ok("sim", "fault", "kill", "1")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
    with no_capacity(cli):
        assert cli("resume", "-d").returncode == 1
        process = cli.start("resume", "-d", "--wait-capacity", "10m")
        planned = newest(cli)["nodes_end"]
        wait_for(lambda: newest(cli)["nodes_end"] > planned, "a connection is a use of the nodes")
        time.sleep(6 * MINUTE)
    finished(process, 0)
    wait_for(lambda: newest(cli)["state"] == "running", "the job runs again")
    assert newest(cli)["nodes_end"] is None
    assert newest(cli)["nodes_end_after_seconds"] == 5 * MINUTE
    cli.ok("cancel")


def test_nodes_end_whatever_ends_the_setup(cli: CommandLine, ec2: Any) -> None:
    """A command that fails, or the end of the client."""
    launch = ("launch", "-d", "--down", "--keep", "1", "short.py")
    cli.write("cloudddp.toml", TOML + '[setup]\nrun = ["false"]\n')
    err = cli.fails(1, *launch)
    # At least ten minutes, in which the user can start it again.
    ends = r"not started; the nodes end at .*, or once unused for 10 min 00 s \(--keep of job "
    assert re.search(ends, err), err
    assert "or once unused for 10 min 00 s" in cli.ok("status")
    cli.write("cloudddp.toml", TOML + '[setup]\nrun = ["sleep 1000"]\n')
    process = cli.start(*launch)
    sleeping = ("exec", "--", "pgrep -x sleep || true")
    wait_for(lambda: cli.ok(*sleeping).count("[node ") == 2, "the setup runs")
    process.kill()
    process.wait()
    sooner = 'sed -i \'s/"seconds": *[0-9.]*/"seconds": 2.0/\' ~/.cloudddp/poweroff.json'
    cli.ok("exec", "--", sooner)  # instead of the ten minutes
    ended(cli, ec2)


def test_launch_that_fails_changes_no_plan(cli: CommandLine, ec2: Any) -> None:
    job = cli.ok("launch", "-d", "--down", "--keep", "4", "short.py").strip()
    wait_for(lambda: newest(cli)["nodes_end"], "the end of the nodes is planned")
    assert re.search(r"the nodes end in \d+ s.* --keep of job ", cli("jobs").stderr)
    cli.ok("sim", "fault", "cut-between", "0", "1")
    ends = f"or once unused for 4 min 00 s (--keep of job {job})"
    assert ends in cli("launch", "count.py").stderr
    assert ends in cli.ok("status")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert (cluster["ends_after_job"], cluster["ends_after_job_minutes"]) == (job, 4)
    ended(cli, ec2)
    for verb in ("jobs", "logs", "pull", "status"):
        err = cli.fails(1, verb)
        assert (
            f"{cluster['cluster_id']}, ended: its nodes powered off by themselves (--keep of job {job}: they "
            "end after 4 min 00 s without a use); results" in err
        )
        assert "that were not pulled from them are lost" in err
