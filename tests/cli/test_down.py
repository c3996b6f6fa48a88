"""`cloudddp down` with whole clusters; test_teardown.py has the removal in every case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyEndpoint


def test_down_removes_everything_and_reports_the_cost(cli: Any, conditions: Any, remains: Any) -> None:
    """It waits for the interfaces of ended nodes, which keep the security group in use (EC2 API reference,
    "DeleteSecurityGroup"). The cost stays known, also without AWS."""
    cli.ok("up", "-n", "2")
    (status,) = json.loads(cli.ok("status", "--json"))

    def cost(**env: str) -> dict[str, Any]:
        listed = json.loads(cli.ok("cost", "--json", **env))
        (found,) = [one for one in listed if one["cluster_id"] == status["cluster_id"]]
        return dict(found)

    assert (cost()["usd"], cost()["running"]) == (pytest.approx(status["usd_so_far"], abs=0.02), True)
    assert "so far" in cli.ok("cost")
    conditions(lingering={"interfaces": 2})
    del cli.env["CLOUDDDP_YES"]
    assert "add -y" in cli.fails(2, "down")
    assert "down --region us-east-1" in cli.fails(1, "down", "-y", "--region", "us-west-2")
    assert len(remains().instances) == 2
    done = cli.exits(0, "down", "-y")
    deleted = "1 placement group deleted, 1 security group deleted, 1 key pair deleted; nothing is left"
    assert f"2 nodes terminated, {deleted}" in done.stdout
    assert "on AWS" in done.stdout
    paid = pytest.approx(float(done.stdout.split("$")[1].split()[0]), abs=0.006)
    assert "waiting until they are no longer in use" in done.stderr
    assert remains().nothing
    assert "nothing to do" in cli.ok("down", "-y", "--region", "us-east-1")
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    for after in (cost(), cost(**nobody)):
        assert (after["usd"], after["running"], after["usd_is_at_most"]) == (paid, False, False)
        assert after["project"] == "project"
    broken = cli.exits(0, "cost", **nobody)
    assert "could not be asked" in broken.stderr, broken.stderr
    assert status["cluster_id"] in broken.stdout


def test_teardown_that_aws_refuses_is_completed_later(
    cli: Any, faults: FaultyEndpoint, ec2: Any, remains: Any
) -> None:
    """Leftovers are listed, with exit code 3. Neither an invalid tag, an unwritable journal nor a lost state
    folder stops it. If the answer of ImportKeyPair is lost, botocore repeats the call: a Duplicate whose tag
    is this cluster's id."""
    faults.lose_answer("ImportKeyPair")
    cli.ok("up", "-n", "1")
    assert faults.count("ImportKeyPair") == 2
    assert len(remains().keys) == 1
    tags = [{"Key": "cloudddp:created", "Value": "2026-11-20T10:00:00"}]  # without a time zone
    ec2.create_tags(Resources=remains().instances, Tags=tags)
    (cluster,) = json.loads(cli.ok("status", "--json"))
    journal = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"] / "journal.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/full")
    faults.fail("TerminateInstances", "OperationNotPermitted")
    err = cli.fails(3, "down", "-y")
    (instance,) = remains().instances
    for expected in (instance, "$1.05 an hour", "OperationNotPermitted"):
        assert expected in err
    shutil.rmtree(journal.parent)
    assert "no key for cluster" in cli.fails(1, "exec", "true")
    # right after a launch, this code does not mean that the instance has been terminated
    faults.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=2)
    cli.ok("down", "-y")
    assert remains().nothing
