"""A job that loses a node: it is replaced in the cluster, and the job continues from its snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, listed_nodes, remaining, running_instances, wait_for
from support.jobs import written

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


def jobs(cli: CommandLine) -> list[dict[str, Any]]:
    return list(json.loads(cli("jobs", "--json").stdout))  # 1 while a new node boots


def running(cli: CommandLine, *words: str, count: int = 2, **env: str) -> str:
    """Start a job in the background; return its id once all its ranks have begun."""
    job = cli.ok("launch", "-d", *words, **env).strip()
    written(cli, "began", count, job=job)
    return job


def kill(cli: CommandLine, node: int) -> None:
    """Let a machine fail, and wait until EC2 says so and the job has ended on the others."""
    killed = listed_nodes(cli)[node]["instance_id"]
    cli.ok("sim", "fault", "kill", killed)
    wait_for(lambda: killed not in live(cli), "EC2 has noticed")
    wait_for(lambda: jobs(cli)[-1]["state"] == "failed", "the job has ended")


def live(cli: CommandLine) -> list[str]:
    return [node["instance_id"] for node in listed_nodes(cli) if node["state"] == "running"]


def described(ec2: Any, cluster: str) -> dict[str, dict[str, Any]]:
    return {one["InstanceId"]: one for one in running_instances(ec2, cluster)}


def test_lost_node_is_replaced_and_the_job_starts_again(cli: CommandLine, ec2: Any) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--tag", "team=vision")
    before = described(ec2, cli.cluster)
    job = running(cli, "-e", "SECRET", "count.py", "--epochs", "3", SECRET="s3cret")
    kill(cli, 1)
    refused = cli("resume")
    assert refused.returncode == 2, refused
    assert "SECRET" in refused.stderr
    done = cli("resume", "-d", job, SECRET="other")
    assert done.returncode == 0, done.stderr
    resumed = done.stdout.strip()
    after = described(ec2, cli.cluster)
    (kept,), (new,) = before.keys() & after.keys(), after.keys() - before.keys()
    for key in ("InstanceType", "ImageId", "SubnetId", "KeyName", "SecurityGroups", "Placement"):
        assert after[new][key] == after[kept][key], key
    tags = [{tag["Key"]: tag["Value"] for tag in after[one]["Tags"]} for one in (kept, new)]
    assert tags[1] == {**tags[0], "cloudddp:node-rank": "1"}
    written(cli, "began", job=resumed)
    assert cli.ok("logs", resumed).count("of 2 other --epochs 3") == 2
    record = jobs(cli)[-1]
    assert (record["id"], record["state"], record["resumed_from"]) == (resumed, "running", job)
    assert "s3cret" not in "".join(
        path.read_text() for path in Path(cli.env["CLOUDDDP_HOME"]).rglob("job-*.json")
    )
    again = cli("resume", job, SECRET="other")
    assert again.returncode == 1
    assert f"was resumed before, as {resumed} (running)" in again.stderr
    cli.ok("exec", "--", "touch enough")
    assert cli("logs", "-f").returncode == 0
    finished = cli("resume", SECRET="other")
    assert "has succeeded" in finished.stderr
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def scarce(cli: CommandLine, count: int) -> None:
    """Let no zone launch more than `count` nodes of the type."""
    capacity = {f"us-east-1{zone}": {"g5.12xlarge": count} for zone in "abcdef"}
    cli.ok("sim", "conditions", json.dumps({"capacity": capacity}))


def test_first_node_is_lost_and_the_job_goes_on_smaller(cli: CommandLine, ec2: Any) -> None:
    cli.nodes(2)
    running(cli, "count.py")
    (_, second) = live(cli)
    kill(cli, 0)
    scarce(cli, 0)
    done = cli("resume")
    assert done.returncode == 1, done
    assert "node 0 could not be replaced" in done.stderr
    assert "InsufficientInstanceCapacity" in done.stderr
    assert list(described(ec2, cli.cluster)) == [second]
    job = cli.ok("resume", "-d", "--nodes-min", "1").strip()
    written(cli, "began 0 of 1", 1, job=job)
    assert "[rank 0 | node 1] began 0 of 1" in cli("logs", job).stdout
    cli.ok("sim", "conditions", "--clear")


def test_silent_node_is_replaced_only_on_request(cli: CommandLine, ec2: Any) -> None:
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.4"
    cli.nodes(2)
    followed = cli.start("launch", "count.py")
    written(cli, "began")
    (first, second) = live(cli)
    cli.ok("sim", "fault", "cut", "1")
    _, err = followed.communicate(timeout=110)
    fails = "node 1: EC2's instance status check has been failing since 20"
    assert fails in err
    refused = cli("resume")
    assert refused.returncode == 1
    assert "EC2 says that node 1 runs, and it does not answer" in refused.stderr
    assert fails in refused.stderr
    assert "resume --replace 1" in refused.stderr
    assert set(described(ec2, cli.cluster)) == {first, second}
    done = cli("resume", "-d", "--replace", "1")
    assert done.returncode == 0, done.stderr
    now = set(described(ec2, cli.cluster))
    assert len(now) == 2
    assert second not in now


def test_watch_resumes_and_exits_with_the_job_s_code(cli: CommandLine) -> None:
    cli.nodes(2)
    cli.write("count.py", COUNT + "raise SystemExit(7)\n")
    running(cli, "count.py")
    process = cli.start("watch")
    other = cli.start("watch")
    kill(cli, 1)
    wait_for(lambda: len(jobs(cli)) == 2 and jobs(cli)[-1]["state"] == "running", "the job was resumed")
    written(cli, "began")
    cli.ok("exec", "--", "touch enough")
    for one in (process, other):
        out, err = one.communicate(timeout=110)
        assert one.returncode == 7, err
        assert "began 1 of 2" in out
        assert all(line.startswith("[rank ") for line in out.splitlines()), out
        assert "next:" not in err, err  # it follows the job by itself
    assert len(jobs(cli)) == 2
