"""Nodes keep their ranks in all commands after another node has ended."""

from __future__ import annotations

import json
import re
from typing import Any

from support.harness import CommandLine, wait_for


def members(cli: CommandLine) -> dict[int | None, str]:
    """Instance ids by node rank, as `status` shows them; None for a foreign instance."""
    return {node["node"]: node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]}


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
