"""What outlives the nodes of a cluster, and clusters in other regions: `ls`, `status`, `down` and `up` show
them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import instances_of, wait_for
from support.interrupts import interrupted_at_call
from support.tagged import tagged_instance

TYPE = "p4d.24xlarge"
Conditions = Callable[..., dict[str, Any]]


@pytest.fixture
def alone(cli: Any, tmp_path: Path) -> Any:
    """The command line with a state folder of its own: no clusters of other tests."""
    cli.env["CLOUDDDP_HOME"] = str(tmp_path / "state")
    return cli


def without_nodes(cli: Any, ec2: Any) -> None:
    """Create a cluster with Elastic IPs, and end its nodes, as their deadline does."""
    done = cli("up", "-n", "2", "-t", TYPE)
    assert "2 Elastic IPs: billed until `down` releases them, also after the deadline" in done.stderr
    found = instances_of(ec2, cli.cluster)
    ec2.terminate_instances(InstanceIds=found)
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have ended")


def test_elastic_ips_that_outlive_the_nodes_are_listed(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    without_nodes(cli, ec2)
    faults.calls.clear()
    listed = cli.messages("ls")
    assert "no clusters" not in listed
    (line,) = [line for line in listed.splitlines() if f"cluster {cli.cluster} " in line]
    assert "2 Elastic IPs" in line
    assert "costing $0.010 an hour" in line
    assert f"down -c {cli.cluster} --region us-east-1" in line
    assert len(faults.calls) == 4
    (entry,) = [one for one in json.loads(cli.ok("ls", "--json")) if one["cluster"] == cli.cluster]
    assert (entry["nodes"], entry["usd_per_hour"]) == ([], 0.01)
    shown = cli.fails(1, "status")
    assert "2 Elastic IPs" in shown
    assert "has no nodes" in shown
    cli.ok("down", "-y")
    assert remains().nothing
    assert f"cluster {cli.cluster} " not in cli("ls").stderr


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
    cli.ok(*words)
    assert len(remains().addresses) == 2


def test_addresses_of_another_computer_are_named_with_down(
    cli: Any, ec2: Any, conditions: Conditions, tmp_path: Path
) -> None:
    conditions(quota={"addresses": 2})
    without_nodes(cli, ec2)
    err = cli.fails(1, "up", "-n", "2", "-t", TYPE, CLOUDDDP_HOME=str(tmp_path / "other"))
    assert "2 of them are left of cluster" in err
    assert "down" in err


def test_killed_up_in_another_region_is_listed(alone: Any, faults: Any, other_region: Any) -> None:
    alone.env["CLOUDDDP_PRICE"] = "1"
    words = ("up", "-n", "1", "--regions", "us-west-2,us-east-1")
    interrupted_at_call(alone, faults, "RunInstances", *words, number=signal.SIGKILL)
    assert len(instances_of(other_region, alone.cluster)) == 1
    assert alone.cluster in alone.ok("ls")


def test_down_names_clusters_of_the_same_name_in_other_regions(
    alone: Any, ec2: Any, remains: Any, other_region: Any
) -> None:
    alone.ok("--region", "us-west-2", "up", "-n", "1", CLOUDDDP_PRICE="1")
    tagged_instance(ec2, alone.cluster)
    done = alone.exits(0, "--region", "us-east-1", "down", "-y")
    assert "nothing is left in us-east-1" in done.stdout
    assert "down --region us-west-2" in done.stderr
    assert remains().nothing
    assert len(instances_of(other_region, alone.cluster)) == 1
