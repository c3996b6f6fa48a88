"""EFA on several network cards: interfaces, Elastic IPs, placement groups, and what is counted on the
nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, running_instances, wait_for

TYPE = "p4d.24xlarge"
CREATED = ("CreatePlacementGroup", "AllocateAddress", "RunInstances", "AssociateAddress")
Conditions = Callable[..., dict[str, Any]]


def test_several_cards_use_elastic_ips(cli: Any, ec2: Any, remains: Any) -> None:
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 0, done.stderr
    assert (
        "EFA with 4 devices per node, nodes close together in a placement group, 2 Elastic IPs" in done.stderr
    )
    assert "warning" not in done.stderr
    found = running_instances(ec2, cli.cluster)
    assert [len(node["NetworkInterfaces"]) for node in found] == [5, 5]
    assert len(remains().addresses) == 2
    assert len(remains().interfaces) == 10
    (group,) = remains().placement_groups
    assert {node["Placement"]["GroupName"] for node in found} == {group}
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    addresses = ec2.describe_addresses(Filters=where)["Addresses"]
    assert {a["PublicIp"] for a in addresses} == {node["PublicIpAddress"] for node in found}
    tags = {tag["Key"] for address in addresses for tag in address["Tags"]}
    assert {"cloudddp:cluster-id", "cloudddp:owner", "cloudddp:expires"} <= tags
    out = cli.ok("down", "-y")
    assert "2 Elastic IPs deleted, 1 placement group deleted" in out
    assert remains().nothing


def test_private_nodes_need_no_elastic_ip(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    cli.ok("up", "-n", "2", "-t", TYPE, "--connect", "private", "--ssh-from", "127.0.0.0/8")
    assert [len(node["NetworkInterfaces"]) for node in running_instances(ec2, cli.cluster)] == [5, 5]
    assert remains().addresses == []
    assert faults.count("DescribeAccountAttributes") == faults.count("AllocateAddress") == 0


def test_single_card_keeps_its_public_address(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    found = running_instances(ec2, cli.cluster)
    assert [[nic["InterfaceType"] for nic in node["NetworkInterfaces"]] for node in found] == [["efa"]] * 2
    assert remains().addresses == []
    assert faults.count("DescribeAddresses") == 0


def test_without_efa_and_placement_group(cli: Any, ec2: Any, remains: Any) -> None:
    done = cli("up", "-n", "2", "-t", TYPE, "--no-efa", "--no-placement-group")
    assert done.returncode == 0, done.stderr
    assert "one of the type's 4 network cards, without EFA" in done.stderr
    (interfaces, others) = (node["NetworkInterfaces"] for node in running_instances(ec2, cli.cluster))
    assert [nic["InterfaceType"] for nic in (*interfaces, *others)] == ["interface"] * 2
    assert remains().addresses == remains().placement_groups == []


def test_next_zone_uses_the_same_group_and_addresses(
    cli: Any, ec2: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    """A placement group of strategy cluster that holds no instance is not bound to a zone."""
    conditions(capacity={"us-east-1a": {TYPE: 0}})
    cli.ok("up", "-n", "2", "-t", TYPE)
    found = running_instances(ec2, cli.cluster)
    assert {node["Placement"]["AvailabilityZone"] for node in found} == {"us-east-1b"}
    assert faults.count("AllocateAddress") == len(remains().addresses) == 2
    assert faults.count("CreatePlacementGroup") == len(remains().placement_groups) == 1


def test_launch_that_fails_later_leaves_no_group_or_address(
    cli: Any, ec2: Any, conditions: Conditions, remains: Any
) -> None:
    """EC2 may accept a launch and terminate an instance instead of running it: the next zone starts anew."""
    conditions(fail_launch={"us-east-1a": {"code": "Server.InsufficientInstanceCapacity"}})
    cli.ok("up", "-n", "2", "-t", TYPE)
    assert {n["Placement"]["AvailabilityZone"] for n in running_instances(ec2, cli.cluster)} == {"us-east-1b"}
    assert (len(remains().addresses), len(remains().placement_groups)) == (2, 1)
    assert len(remains().groups) == 1


def test_placement_group_in_the_file(cli: Any, remains: Any) -> None:
    cli.write("cloudddp.toml", "[cluster]\nplacement_group = false\n")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    assert remains().placement_groups == []


def test_single_node_has_neither(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1", "-t", TYPE)
    assert remains().addresses == remains().placement_groups == []


@pytest.mark.parametrize("words", [["-t", "g5.xlarge"], ["-t", TYPE, "--no-efa"]])
def test_required_efa_that_is_impossible(cli: Any, faults: Any, words: list[str]) -> None:
    done = cli("up", *words, "--require-efa")
    assert done.returncode == 2, done.stderr
    assert "EFA" in done.stderr
    assert not [call for call in faults.calls if not call.startswith(("Describe", "Get"))]


def test_missing_devices_are_a_warning(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(efa_devices={TYPE: 3})
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 0, done.stderr
    assert "shows 3 of 4 EFA devices" in done.stderr
    assert len(remains().instances) == 2


def test_missing_devices_fail_if_required(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(efa_devices={TYPE: 3})
    done = cli("up", "-n", "2", "-t", TYPE, "--require-efa")
    assert done.returncode == 1
    assert "shows 3 of 4 EFA devices" in done.stderr
    assert remains().nothing


def test_repeated_up_expects_what_the_cluster_was_launched_with(
    cli: Any, ec2: Any, conditions: Conditions
) -> None:
    conditions(efa_devices={TYPE: 3})
    cli.ok("up", "-n", "2", "-t", TYPE)
    again = cli("up", "-n", "2", "-t", TYPE)
    assert again.returncode == 0, again.stderr
    assert "warning: node 0" in again.stderr
    assert "shows 3 of 4 EFA devices" in again.stderr
    refused = cli("up", "-n", "2", "-t", TYPE, "--require-efa")
    assert refused.returncode == 1
    assert "shows 3 of 4 EFA devices" in refused.stderr
    # A cluster that was created with --require-efa, whose `up` was killed: the option need not be repeated.
    ids = [node["InstanceId"] for node in running_instances(ec2, cli.cluster)]
    ec2.create_tags(Resources=ids, Tags=[{"Key": "cloudddp:require-efa", "Value": "yes"}])
    assert cli("up", "-n", "2", "-t", TYPE).returncode == 1


def test_missing_devices_fail_if_required_where_gpus_may_be_missing(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(efa_devices={TYPE: 3}, boot={"failed_gpus": 1})
    done = cli("up", "-n", "2", "-t", TYPE, "--require-efa", "--allow-cpu", CLOUDDDP_TIME_SCALE="0.05")
    assert "warning: node 0" in done.stderr
    assert done.returncode == 1
    assert "shows 3 of 4 EFA devices" in done.stderr
    assert remains().nothing


@pytest.mark.parametrize(("require", "shown"), [("true", "Libfabric"), ("false", "None")])
def test_required_efa_reaches_the_ranks(cli: Any, require: str, shown: str) -> None:
    """NCCL_NET names AWS's plugin: NCCL then fails where it would use TCP (NCCL documentation, environment
    variables)."""
    cli.write("cloudddp.toml", f"[cluster]\nrequire_efa = {require}\n[job]\nrendezvous = 'direct'\n")
    cli.write("show.py", "import os; print('net:', os.environ.get('NCCL_NET'))")
    cli.ok("up", "-n", "2", "-t", TYPE)
    assert f"net: {shown}" in cli.ok("launch", "--nproc-per-node", "1", "show.py")


def test_launch_without_required_devices_is_refused(cli: Any) -> None:
    cli.ok("up", "-n", "1", "-t", "g5.12xlarge")
    cli.write("show.py", "print('ran')")
    done = cli("launch", "show.py", CLOUDDDP_REQUIRE_EFA="true")
    assert done.returncode == 1
    assert "node 0 shows no EFA device" in done.stderr


def test_too_few_elastic_ips_are_refused_before_anything_is_created(
    cli: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    """DescribeAccountAttributes gives the limit, 5 by default."""
    conditions(quota={"addresses": 1})
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 1
    assert "need 2 Elastic IPs; the account may have 1 in us-east-1" in done.stderr
    assert "Service Quotas" in done.stderr
    assert "--no-efa" in done.stderr
    assert faults.count("ImportKeyPair") == 0


def test_limit_that_is_met_later_leaves_nothing(cli: Any, faults: Any, remains: Any) -> None:
    faults.fail("AllocateAddress", "AddressLimitExceeded")
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 1
    assert "AddressLimitExceeded" in done.stderr
    assert "Service Quotas" in done.stderr
    assert faults.count("RunInstances") == 0
    assert remains().nothing


@pytest.mark.parametrize("action", CREATED)
def test_refused_call_leaves_nothing(cli: Any, faults: Any, remains: Any, action: str) -> None:
    faults.fail(action, "UnauthorizedOperation", times=20)
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 1
    assert "UnauthorizedOperation" in done.stderr
    assert remains().nothing


@pytest.mark.parametrize("action", CREATED)
def test_interrupt_at_each_step_leaves_nothing(cli: Any, faults: Any, remains: Any, action: str) -> None:
    came, go = faults.hold(action)
    process = cli.start("up", "-n", "2", "-t", TYPE)
    assert came.wait(60)
    process.send_signal(2)
    go.set()
    code, _, err = interrupt(process, 0)
    assert code == 130, err
    assert remains().nothing


@pytest.mark.parametrize("action", CREATED)
def test_down_finds_what_a_killed_up_has_created(cli: Any, faults: Any, remains: Any, action: str) -> None:
    came, go = faults.hold(action)
    process = cli.start("up", "-n", "2", "-t", TYPE)
    assert came.wait(60)
    process.kill()
    process.communicate(timeout=TIMEOUT)
    go.set()
    assert not remains().nothing
    cli.ok("down", "-y")
    assert remains().nothing


def test_down_on_another_computer_releases_elastic_ips(cli: Any, remains: Any, tmp_path: Any) -> None:
    cli.ok("up", "-n", "2", "-t", TYPE)
    cli.ok("down", "-y", CLOUDDDP_HOME=str(tmp_path / "other"))
    assert remains().nothing


def test_up_after_a_killed_up_associates_the_addresses(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    came, go = faults.hold("DescribeAddresses")
    process = cli.start("up", "-n", "2", "-t", TYPE)
    assert came.wait(60)
    go.set()  # the check of the limit
    wait_for(lambda: faults.count("RunInstances") == 1, "the nodes are started")
    came, go = faults.hold("DescribeAddresses")
    assert came.wait(60)
    process.kill()
    process.communicate(timeout=TIMEOUT)
    go.set()
    wait_for(lambda: len(running_instances(ec2, cli.cluster)) == 2, "the nodes run")
    assert not any(node.get("PublicIpAddress") for node in running_instances(ec2, cli.cluster))
    done = cli("up", "-n", "2", "-t", TYPE)
    assert done.returncode == 0, done.stderr
    assert all(node.get("PublicIpAddress") for node in running_instances(ec2, cli.cluster))


def test_address_that_was_allocated_twice_is_released(cli: Any, faults: Any, remains: Any) -> None:
    """AllocateAddress has no idempotency token: botocore repeats a call whose answer was lost."""
    faults.lose_answer("AllocateAddress")
    cli.ok("up", "-n", "2", "-t", TYPE)
    assert faults.count("AllocateAddress") == 3
    assert len(remains().addresses) == 2


def test_duplicate_placement_group_after_a_lost_answer_is_used(cli: Any, faults: Any, remains: Any) -> None:
    faults.lose_answer("CreatePlacementGroup")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    assert faults.count("CreatePlacementGroup") == 2
    assert len(remains().placement_groups) == 1


def test_placement_group_that_is_not_known_yet(cli: Any, faults: Any) -> None:
    faults.fail("RunInstances", "InvalidPlacementGroup.Unknown", times=2)
    assert "is ready" in cli.ok("up", "-n", "2", "-t", "g5.12xlarge")


@pytest.mark.parametrize(
    ("action", "code"),
    [("DeletePlacementGroup", "InvalidPlacementGroup.InUse"), ("ReleaseAddress", "InvalidIPAddress.InUse")],
)
def test_resource_in_use_is_removed_later(
    cli: Any, faults: Any, remains: Any, action: str, code: str
) -> None:
    cli.ok("up", "-n", "2", "-t", TYPE)
    faults.fail(action, code, times=2)
    cli.ok("down", "-y")
    assert remains().nothing


def test_leftover_address_is_listed_with_its_price(cli: Any, faults: Any, remains: Any) -> None:
    cli.ok("up", "-n", "2", "-t", TYPE)
    faults.fail("ReleaseAddress", "UnauthorizedOperation", times=100)
    done = cli("down", "-y")
    assert done.returncode == 3
    assert "2 Elastic IP" not in done.stdout
    assert "costing $0.01 an hour" in done.stderr
    assert all(one in done.stderr for one in remains().addresses)
    faults.clear()
    cli.ok("down", "-y")
    assert remains().nothing


def test_calls_for_addresses_are_two_per_node(cli: Any, faults: Any) -> None:
    cli.ok("up", "-n", "3", "-t", TYPE)
    assert faults.count("AllocateAddress") == faults.count("AssociateAddress") == 3
    assert faults.count("DescribeAddresses") == 2
