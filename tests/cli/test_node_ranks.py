"""Nodes keep their ranks in all commands after another node has ended; foreign instances are not used."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from support.harness import CommandLine, wait_for


def members(cli: CommandLine) -> dict[int | None, str]:
    """Instance ids by node rank, as `status` shows them; None for a foreign instance."""
    return {node["node"]: node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]}


def row(text: str, instance: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if instance in line]
    return line.split()


def launch_copy(ec2: Any, instance: str) -> str:
    """Launch an instance with image, key, user data and tags of another one, as the AWS console can."""
    where = [{"Name": "instance-id", "Values": [instance]}]
    ((ours,),) = [r["Instances"] for r in ec2.describe_instances(Filters=where)["Reservations"]]
    data = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    tags = [tag for tag in ours["Tags"] if tag["Key"].startswith("cloudddp:")]
    copy = ec2.run_instances(
        ImageId=ours["ImageId"],
        InstanceType=ours["InstanceType"],
        KeyName=ours["KeyName"],
        MinCount=1,
        MaxCount=1,
        UserData=base64.b64decode(data["UserData"]["Value"]).decode(),
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    return str(copy["Instances"][0]["InstanceId"])


def test_foreign_instance_is_shown_and_terminated_but_never_used(
    cli: CommandLine, ec2: Any, remains: Any
) -> None:
    cli.ok("up", "-n", "2")
    nodes = members(cli)
    foreign = launch_copy(ec2, nodes[0])
    wait_for(lambda: members(cli) == {**nodes, None: foreign}, "it is listed")
    warning = f"instance {foreign} has the tags of cluster '{cli.cluster}' but is not one of its nodes: "

    shown = cli("status")
    assert f"warning: {warning}it was launched separately" in shown.stderr
    assert row(shown.stdout, foreign)[0] == "-"
    assert [row(shown.stdout, nodes[rank])[0] for rank in (0, 1)] == ["0", "1"]
    (billed,) = [one for one in json.loads(cli.ok("ls", "--json")) if one["cluster"] == cli.cluster]
    assert billed["usd_per_hour"] > 3.0  # 3 x 1.006, with disks and addresses
    used = cli.exits(0, "exec", "--", "echo here")
    assert sorted(used.stdout.splitlines()) == ["[node 0] here", "[node 1] here"]
    assert warning in used.stderr
    # Its rank tag may claim a node's rank: it is still not that node.
    ec2.create_tags(Resources=[foreign], Tags=[{"Key": "cloudddp:node-rank", "Value": "0"}])
    claimed = cli("exec", "--node", "0", "--", "echo here")
    assert claimed.stdout == "here\n"
    assert f"{warning}node 0 is {nodes[0]}" in claimed.stderr
    assert members(cli) == {**nodes, None: foreign}

    ended = cli("down", "-y")
    assert "3 nodes terminated" in ended.stdout
    assert warning in ended.stderr
    assert remains().nothing


def test_nodes_are_tagged_where_ec2_has_not_numbered_them(cli: CommandLine, faults: Any, ec2: Any) -> None:
    """EC2 documents unique launch indexes for RunInstances, and always 0 for Auto Scaling and fleets."""
    for action in ("RunInstances", "DescribeInstances"):
        faults.rewrite(action, lambda body: re.sub(rb"<amiLaunchIndex>\d+<", b"<amiLaunchIndex>0<", body))
    cli.ok("up", "-n", "2")
    assert faults.count("CreateTags") == 2
    before = members(cli)
    assert sorted(before) == [0, 1]
    ec2.terminate_instances(InstanceIds=[before[0]])
    wait_for(lambda: members(cli) == {1: before[1]}, "the other one keeps its rank")
