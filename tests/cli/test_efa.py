"""EFA on several network cards. tests/unit/test_golden_requests.py has the requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.harness import running_instances

from cloudddp.aws import instance_types
from cloudddp.aws.client import AWS
from cloudddp.cluster.requests import ORDINARY, choose_interfaces, wants_placement_group
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.simulator.aws import rehearse

TYPE = "p4d.24xlarge"
Conditions = Callable[..., dict[str, Any]]


def test_several_cards_use_elastic_ips(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    """Although AWS does not know the group yet, and both are still in use when they are first removed."""
    cli.write("cloudddp.toml", "[cluster]\nrequire_efa = true\n[job]\nrendezvous = 'direct'\n")
    faults.lose_answer("CreatePlacementGroup")
    faults.fail("RunInstances", "InvalidPlacementGroup.Unknown", times=2)
    err = cli.messages("up", "-n", "2", "-t", TYPE)
    assert "EFA with 4 devices per node, nodes close together in a placement group, 2 Elastic IPs" in err
    assert "warning" not in err
    assert faults.count("CreatePlacementGroup") == 2
    found = running_instances(ec2, cli.cluster)
    assert [len(node["NetworkInterfaces"]) for node in found] == [5, 5]
    assert len(remains().interfaces) == 10
    (group,) = remains().placement_groups
    assert {node["Placement"]["GroupName"] for node in found} == {group}
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    addresses = ec2.describe_addresses(Filters=where)["Addresses"]
    assert {a["PublicIp"] for a in addresses} == {node["PublicIpAddress"] for node in found}
    tags = {tag["Key"] for address in addresses for tag in address["Tags"]}
    assert {"cloudddp:cluster-id", "cloudddp:owner", "cloudddp:expires"} <= tags
    # NCCL_NET names AWS's plugin: NCCL then fails where it would use TCP (NCCL documentation)
    cli.write("show.py", "import os; print('net:', os.environ.get('NCCL_NET'))")
    assert "net: Libfabric" in cli.ok("launch", "--nproc-per-node", "1", "show.py")
    faults.fail("DeletePlacementGroup", "InvalidPlacementGroup.InUse")
    faults.fail("ReleaseAddress", "InvalidIPAddress.InUse")
    assert "2 Elastic IPs deleted, 1 placement group deleted" in cli.ok("down", "-y")
    assert remains().nothing


def test_single_node_and_cluster_without_efa_have_neither(cli: Any) -> None:
    del cli.env["CLOUDDDP_YES"]
    done = cli("up", "-n", "2", "-t", TYPE, "--no-efa", "--no-placement-group")
    assert "one of the type's 4 network cards, without EFA" in done.stderr
    with rehearse():
        for spec in (
            ClusterSpec(instance_type=TYPE, nodes=1),
            ClusterSpec(instance_type=TYPE, nodes=2, efa=False, placement_group=False),
        ):
            info = instance_types.describe(AWS(region="us-east-1"), spec)
            assert choose_interfaces(spec, info) == ORDINARY
            assert not wants_placement_group(spec, info, None)


def test_missing_devices_fail_if_required(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(efa_devices={TYPE: 3})
    assert "shows 3 of 4 EFA devices" in cli.fails(1, "up", "-n", "2", "-t", TYPE, "--require-efa")
    assert remains().nothing


def test_missing_devices_are_a_warning_unless_they_are_required(
    cli: Any, ec2: Any, conditions: Conditions
) -> None:
    """As in a cluster that was created with --require-efa, whose `up` was killed: a tag remembers it."""
    conditions(efa_devices={TYPE: 3})
    err = cli.messages("up", "-n", "2", "-t", TYPE)
    assert "warning: node 0" in err
    assert "shows 3 of 4 EFA devices" in err
    ids = [node["InstanceId"] for node in running_instances(ec2, cli.cluster)]
    ec2.create_tags(Resources=ids, Tags=[{"Key": "cloudddp:require-efa", "Value": "yes"}])
    assert "shows 3 of 4 EFA devices" in cli.fails(1, "up", "-n", "2", "-t", TYPE)


def test_launch_without_required_devices_is_refused(cli: Any) -> None:
    cli.nodes(1)
    cli.write("show.py", "print('ran')")
    assert "node 0 shows no EFA device" in cli.fails(1, "launch", "show.py", CLOUDDDP_REQUIRE_EFA="true")


def test_too_few_elastic_ips_are_refused_before_anything_is_created(
    cli: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    """DescribeAccountAttributes gives the limit, 5 by default."""
    conditions(quota={"addresses": 1})
    err = cli.fails(1, "up", "-n", "2", "-t", TYPE)
    assert "need 2 Elastic IPs; the account may have 1 in us-east-1" in err
    assert "Service Quotas" in err
    assert "--no-efa" in err
    assert faults.count("ImportKeyPair") == 0


def test_refused_address_leaves_nothing(cli: Any, faults: Any, remains: Any) -> None:
    faults.fail("AllocateAddress", "AddressLimitExceeded", times=20)
    err = cli.fails(1, "up", "-n", "2", "-t", TYPE)
    assert "AddressLimitExceeded" in err
    assert "Service Quotas" in err
    assert remains().nothing
