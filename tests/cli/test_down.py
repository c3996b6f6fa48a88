"""`cloudddp down`: removes everything with the tag, instances first; leftovers are listed, with exit code
3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from support.faults import FaultyEndpoint
from support.harness import wait_for


def test_down_removes_everything_and_reports_the_cost(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "2")
    out = cli.ok("down", "-y")
    assert (
        "2 nodes terminated, 1 placement group deleted, 1 security group deleted, 1 key pair deleted; "
        "nothing is left" in out
    )
    assert "on AWS" in out
    assert "$" in out
    assert remains().nothing


def test_second_down_exits_0(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    cli.ok("down", "-y")
    assert "nothing to do" in cli.ok("down", "-y")


def test_down_without_local_state(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    shutil.rmtree(Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"])
    lost = cli("exec", "true")
    assert lost.returncode == 1
    assert "no key for cluster" in lost.stderr
    cli.ok("down", "-y")
    assert remains().nothing


def test_down_terminates_instances_first(cli: Any, faults: FaultyEndpoint) -> None:
    cli.ok("up", "-n", "1")
    faults.calls.clear()
    cli.ok("down", "-y")
    assert faults.calls.index("TerminateInstances") < faults.calls.index("DeleteSecurityGroup")


def test_down_waits_while_a_group_is_in_use(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    faults.fail("DeleteSecurityGroup", "DependencyViolation", times=2)
    cli.ok("down", "-y")
    assert faults.count("DeleteSecurityGroup") == 3
    assert remains().nothing


def test_leftovers_are_listed_with_exit_code_3(cli: Any, faults: FaultyEndpoint, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    faults.fail("TerminateInstances", "OperationNotPermitted")
    done = cli("down", "-y")
    assert done.returncode == 3
    (instance,) = remains().instances
    assert instance in done.stderr
    assert "$1.05 an hour" in done.stderr
    assert "OperationNotPermitted" in done.stderr
    cli.ok("down", "-y")
    assert remains().nothing


def test_protected_instance_does_not_keep_others_running(cli: Any, ec2: Any, remains: Any) -> None:
    """One refused id fails the whole TerminateInstances call."""
    cli.ok("up", "-n", "3")
    kept, *others = sorted(remains().instances)
    ec2.modify_instance_attribute(InstanceId=kept, DisableApiTermination={"Value": True})
    try:
        done = cli("down", "-y")
    finally:
        ec2.modify_instance_attribute(InstanceId=kept, DisableApiTermination={"Value": False})
    assert done.returncode == 3
    assert f"instance {kept} (running)" in done.stderr
    assert "OperationNotPermitted" in done.stderr
    wait_for(lambda: remains().instances == [kept], f"{others} are terminated")
    cli.ok("down", "-y")
    assert remains().nothing


def test_volume_that_outlives_its_instance_is_deleted(cli: Any, ec2: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    tags = [
        {"Key": "cloudddp:cluster", "Value": cli.cluster},
        {"Key": "cloudddp:cluster-id", "Value": cluster["cluster_id"]},
    ]
    ec2.create_volume(
        AvailabilityZone="us-east-1a", Size=8, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    cli.ok("down", "-y")
    assert remains().nothing


def test_down_without_terminal_needs_yes(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    del cli.env["CLOUDDDP_YES"]
    done = cli("down")
    assert done.returncode == 2
    assert "add -y" in done.stderr
    assert len(remains().instances) == 1


def test_node_deadline_equals_cluster_deadline(cli: Any, ec2: Any) -> None:
    """The node's own timer, as the simulator reads it from the user data."""
    cli.ok("up", "-n", "1", "--max-hours", "0.17")
    (shown,) = [
        n
        for n in json.loads(cli.ok("sim", "status", "--json"))["nodes"]
        if n["state"] == "running" and n["deadline"] and n["instance_id"] in cli.ok("status")
    ]
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert shown["deadline"].replace(" ", "T")[:19] == cluster["expires"][:19]


def test_unwritable_journal_does_not_stop_the_teardown(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    journal = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"] / "journal.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/full")
    cli.ok("down", "-y")
    assert remains().nothing


def test_instance_unknown_to_aws_yet_is_terminated(cli: Any, faults: Any, remains: Any) -> None:
    """InvalidInstanceID.NotFound right after a launch does not mean that the instance has been terminated."""
    cli.ok("up", "-n", "1")
    faults.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=2)
    cli.ok("down", "-y")
    assert remains().nothing


def test_expired_credentials_during_teardown_list_remaining_resources(
    cli: Any, faults: Any, ec2: Any
) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    faults.fail("TerminateInstances", "ExpiredToken", times=9)
    done = cli("down", "-y")
    assert done.returncode == 3
    assert cluster["nodes"][0]["instance_id"] in done.stderr
    assert "ExpiredToken" in done.stderr


def test_down_in_the_wrong_region_names_the_right_one(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    done = cli("down", "-y", "--region", "us-west-2")
    assert done.returncode == 1
    assert "us-east-1" in done.stderr
    assert "down --region us-east-1" in done.stderr


def test_tag_without_time_zone_does_not_stop_the_teardown(cli: Any, ec2: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    ec2.create_tags(
        Resources=remains().instances, Tags=[{"Key": "cloudddp:created", "Value": "2026-11-20T10:00:00"}]
    )
    cli.ok("status")
    cli.ok("down", "-y")
    assert remains().nothing
