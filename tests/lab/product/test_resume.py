"""A job that loses a node: it is replaced in the cluster, and the job continues from its snapshot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.harness import (
    CommandLine,
    finished,
    listed_nodes,
    no_capacity,
    running_instances,
    wait_for,
)
from support.jobs import newest, written

TOML = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nheartbeat = 4\n[job.env]\nOMP_NUM_THREADS = "1"\n'
# Counts until `enough` exists on the node of rank 0; continues from its file.
COUNT = """
import os, pathlib, sys, time
print('began', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ.get('SECRET'), *sys.argv[1:], flush=True)
while not os.path.exists('enough'): time.sleep(0.05)
print('ended', flush=True)
"""  # noqa: E501


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("count.py", COUNT)
    return lab_cli


def kill(cli: CommandLine, node: int) -> None:
    """Let a machine fail, and wait until EC2 says so and the job has ended on the others."""
    killed = listed_nodes(cli)[node]["instance_id"]
    cli.ok("sim", "fault", "kill", killed)
    wait_for(lambda: killed not in live(cli), "EC2 has noticed")
    wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")


def live(cli: CommandLine) -> list[str]:
    return [node["instance_id"] for node in listed_nodes(cli) if node["state"] == "running"]


def described(ec2: Any, cluster: str) -> dict[str, dict[str, Any]]:
    return {one["InstanceId"]: one for one in running_instances(ec2, cluster)}


def test_first_node_is_lost_and_the_job_goes_on_smaller(cli: CommandLine, ec2: Any) -> None:
    cli.nodes(2)
    written(cli, "began", job=cli.ok("launch", "-d", "count.py").strip())
    (_, second) = live(cli)
    kill(cli, 0)
    with no_capacity(cli):
        err = cli.fails(1, "resume")
        assert "node 0 could not be replaced" in err
        assert "InsufficientInstanceCapacity" in err
        assert list(described(ec2, cli.cluster)) == [second]
        job = cli.ok("resume", "-d", "--nodes-min", "1").strip()
    written(cli, "began 0 of 1", 1, job=job)
    assert "[rank 0 | node 1] began 0 of 1" in cli("logs", job).stdout


def test_silent_node_is_replaced_only_on_request(cli: CommandLine, ec2: Any) -> None:
    """By a node like it, on which the job starts as before, with the variables of now."""
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.4"
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--tag", "team=vision")
    followed = cli.start("launch", "-e", "SECRET", "count.py", "--epochs", "3", SECRET="s3cret")
    written(cli, "began")
    job, (first, second), before = newest(cli)["id"], live(cli), described(ec2, cli.cluster)
    cli.ok("sim", "fault", "cut", "1")
    _, err = followed.communicate()
    fails = "node 1: EC2's instance status check has been failing since 20"
    assert fails in err
    refused = cli.fails(1, "resume", SECRET="other")
    assert "EC2 says that node 1 runs, and it does not answer" in refused
    assert fails in refused
    assert "resume --replace 1" in refused
    assert set(described(ec2, cli.cluster)) == {first, second}
    resumed = cli.ok("resume", "-d", "--replace", "1", SECRET="other").strip()
    after = described(ec2, cli.cluster)
    (new,) = after.keys() - before.keys()
    assert after.keys() == {first, new}
    for key in ("InstanceType", "ImageId", "SubnetId", "KeyName", "SecurityGroups", "Placement"):
        assert after[new][key] == after[first][key], key
    tags = [{tag["Key"]: tag["Value"] for tag in after[one]["Tags"]} for one in (first, new)]
    assert tags[1] == {**tags[0], "cloudddp:node-rank": "1"}
    written(cli, "began", job=resumed)
    assert cli.ok("logs", resumed).count("of 2 other --epochs 3") == 2
    record = newest(cli)
    assert (record["id"], record["state"], record["resumed_from"]) == (resumed, "running", job)


def test_job_with_retries_is_resumed_after_a_slow_reboot(cli: CommandLine, ec2: Any) -> None:
    """On the same nodes."""
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.2"
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    before = live(cli)
    process = cli.start("launch", "--retries", "1", "count.py")
    written(cli, "began")
    cli.ok("sim", "conditions", json.dumps({"boot": {"ssh_seconds": 15}}))
    ec2.reboot_instances(InstanceIds=before[1:])
    wait_for(lambda: newest(cli)["state"] == "running" and newest(cli)["resumed_from"], "it was resumed")
    written(cli, "began", job=newest(cli)["id"])
    cli.ok("sim", "conditions", "--clear")
    cli.ok("exec", "--", "touch enough")
    _, err = finished(process, 0)
    assert "node 1 may be rebooting: waiting until it responds, or has ended" in err
    assert live(cli) == before
