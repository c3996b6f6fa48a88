"""A node that reboots while a job runs there: that is named as the cause, and the job can be resumed on the
same node."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.harness import CommandLine, wait_for
from support.jobs import newest, written

TOML = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nheartbeat = 4\n'
# Runs until `enough` exists on its node.
COUNT = """
import os, time
print('began', os.environ['RANK'], flush=True)
while not os.path.exists('enough'): time.sleep(0.05)
"""
REBOOTED = re.compile(
    r"node [01] was rebooted while the job ran \(it started again at (\d\d:\d\d:\d\d) UTC\)"
)


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("count.py", COUNT)
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    return lab_cli


def instances(cli: CommandLine) -> list[str]:
    return [node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]]


def test_reboot_ends_a_job_that_is_followed(cli: CommandLine, ec2: Any) -> None:
    before = instances(cli)
    process = cli.start("launch", "count.py")
    written(cli, "began")
    ec2.reboot_instances(InstanceIds=[before[1]])
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1, err
    assert REBOOTED.search(err), err
    job = newest(cli)
    assert (job["state"], job["exit_code"]) == ("failed", 1)
    assert f"resume {job['id']}` starts the job again" in err
    resumed = cli.ok("resume", "-d").strip()
    written(cli, "began", job=resumed)
    assert instances(cli) == before
    cli.ok("exec", "--", "touch enough")
    assert cli("logs", "-f", resumed).returncode == 0


def test_job_with_retries_is_resumed_after_a_slow_reboot(cli: CommandLine, ec2: Any) -> None:
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.2"
    before = instances(cli)
    process = cli.start("launch", "--retries", "1", "count.py")
    written(cli, "began")
    cli.ok("sim", "conditions", json.dumps({"boot": {"ssh_seconds": 15}}))
    ec2.reboot_instances(InstanceIds=[before[1]])
    wait_for(lambda: newest(cli)["state"] == "running" and newest(cli)["resumed_from"], "it was resumed")
    written(cli, "began", job=newest(cli)["id"])
    cli.ok("sim", "conditions", "--clear")
    cli.ok("exec", "--", "touch enough")
    _, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert "node 1 may be rebooting: waiting until it responds, or has ended" in err
    assert instances(cli) == before
