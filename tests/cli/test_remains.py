"""What outlives the nodes of a cluster, and clusters in other regions: `ls`, `status`, `down` and `up` show
them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import wait_for
from support.interrupts import interrupted_at_call
from support.tagged import CLUSTER_ID

TYPE = "p4d.24xlarge"
Conditions = Callable[..., dict[str, Any]]


@pytest.fixture
def alone(cli: Any, tmp_path: Path) -> Any:
    """The command line with a state folder of its own: no clusters of other tests."""
    cli.env["CLOUDDDP_HOME"] = str(tmp_path / "state")
    return cli


def test_elastic_ips_that_outlive_the_nodes_are_listed(
    alone: Any, ec2: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    """They are of another computer of the same user."""
    tags = {"cluster": alone.cluster, "cluster-id": CLUSTER_ID, "owner": "user/moto"}
    pairs = [{"Key": f"cloudddp:{key}", "Value": value} for key, value in tags.items()]
    for _ in range(2):
        ec2.allocate_address(TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": pairs}])
    listed = alone.messages("ls")
    assert "no clusters" not in listed
    (line,) = [line for line in listed.splitlines() if f"cluster {alone.cluster} " in line]
    assert "2 Elastic IPs" in line
    assert "costing $0.010 an hour" in line
    assert f"down -c {alone.cluster} --region us-east-1" in line
    assert len(faults.calls) == 4
    (entry,) = [one for one in json.loads(alone.ok("ls", "--json")) if one["cluster"] == alone.cluster]
    assert (entry["nodes"], entry["usd_per_hour"], entry["usd_per_hour_is_at_most"]) == ([], 0.01, False)
    shown = alone.fails(1, "status")
    assert "2 Elastic IPs" in shown
    assert "has no nodes" in shown
    conditions(quota={"addresses": 2})
    assert "2 of them are left of cluster" in alone.fails(1, "up", "-n", "2", "-t", TYPE)
    alone.ok("down", "-y")
    assert remains().nothing
    assert f"cluster {alone.cluster} " not in alone("ls").stderr


def test_addresses_of_a_killed_up_do_not_count_against_the_limit(
    cli: Any, ec2: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(quota={"addresses": 2})
    words = ("up", "-n", "2", "-t", TYPE)
    interrupted_at_call(cli, faults, "AssociateAddress", *words, number=signal.SIGKILL)
    found = remains()
    assert len(found.addresses) == 2
    ec2.terminate_instances(InstanceIds=found.instances)
    wait_for(lambda: not remains().instances, "the nodes have ended")
    shown = cli.messages(*words)
    assert "2 Elastic IPs: billed until `down` releases them, also after the deadline" in shown
    assert len(remains().addresses) == 2
