"""`cloudddp up`: what it creates, what it refuses, and that nothing is left when it fails."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from support.faults import without_element
from support.harness import clean_environment, running_instances
from support.interrupts import interrupted_at_call
from support.teardown_account import Account

TYPE = "g5.12xlarge"  # in a placement group


def test_up_creates_the_requested_cluster_and_a_second_one_changes_nothing(
    cli: Any, ec2: Any, faults: Any, remains: Any
) -> None:
    """The requests themselves are in tests/golden/requests."""
    assert "is ready" in cli.ok("up", "-n", "2", "-t", "g5.xlarge", "--max-hours", "3")
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    found = running_instances(ec2, cli.cluster)
    assert len(found) == 2
    for instance in found:
        attribute = ec2.describe_instance_attribute(
            InstanceId=instance["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert attribute["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    to_itself = [{"GroupId": group["GroupId"]}]
    inside = [p for p in group["IpPermissions"] if p["IpProtocol"] == "-1"]
    assert [{"GroupId": pair["GroupId"]} for p in inside for pair in p["UserIdGroupPairs"]] == to_itself
    outside = [pair for p in group["IpPermissionsEgress"] for pair in p["UserIdGroupPairs"]]
    assert [{"GroupId": pair["GroupId"]} for pair in outside] == to_itself
    ssh = [r["CidrIp"] for p in group["IpPermissions"] if p["IpProtocol"] == "tcp" for r in p["IpRanges"]]
    assert ssh == ["127.0.0.1/32"]
    before = remains()
    faults.calls.clear()
    again = ("up", "-n", "2", "-t", "g5.xlarge", "--max-hours", "20", "--max-cost", "100")
    assert "nothing was changed" in cli.ok(*again)
    assert set(faults.calls) == {"DescribeInstances"}
    assert "it has 2 nodes, 3 were requested" in cli.fails(1, "up", "-n", "3", "-t", "g5.xlarge")
    assert remains() == before
    cli.ok("down", "-y")
    assert not {"DescribeRegions", "GetCallerIdentity"} & set(faults.calls)  # the cluster is recorded here


def test_missing_credentials_are_reported(cli: Any) -> None:
    cli.env = {**clean_environment(AWS_REGION="us-east-1"), "CLOUDDDP_HOME": cli.env["CLOUDDDP_HOME"]}
    err = cli.fails(1, "up", "-y")
    assert "no AWS credentials" in err
    assert "aws configure" in err


def test_type_without_gpu_needs_allow_cpu(cli: Any, faults: Any) -> None:
    err = cli.fails(2, "up", "-t", "t3.micro", "--price", "0.01")
    assert "t3.micro has no GPU" in err
    assert "--allow-cpu" in err
    assert not any(call.startswith(("Run", "Create", "Import")) for call in faults.calls)
    del cli.env["CLOUDDDP_YES"]
    planned = cli("up", "-n", "1", "-t", "t3.micro", "--price", "0.01", "--allow-cpu")
    assert "$0.01 per node (as given)" in planned.stderr


def test_unknown_price_is_refused(account: Account) -> None:
    error = account.failed_up(instance_type="t3.micro", allow_cpu=True)
    assert error.exit_code == 2
    assert "--price" in error.hint
    assert "RunInstances" not in account.faults.calls


@pytest.mark.parametrize(
    "action",
    [
        "AuthorizeSecurityGroupEgress",
        "AuthorizeSecurityGroupIngress",
        "CreatePlacementGroup",
        "CreateSecurityGroup",
        "DescribeSubnets",
        "ImportKeyPair",
        "RunInstances",
    ],
)
def test_refused_call_leaves_nothing(account: Account, action: str) -> None:
    account.faults.fail(action, "UnauthorizedOperation", times=20)
    assert "UnauthorizedOperation" in account.failed_up(instance_type=TYPE).message
    assert account.faults.count(action) == 1
    assert account.listed() == []


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("IdempotentInstanceTerminated", "then `cloudddp up` again"),
        ("InsufficientAddressCapacity", "wait some minutes"),
    ],
)
def test_refused_launch_has_a_hint(account: Account, code: str, hint: str) -> None:
    account.faults.fail("RunInstances", code, times=20)
    error = account.failed_up(nodes=1)
    assert code in error.message
    assert hint in error.hint
    assert account.listed() == []


def test_calls_are_repeated_until_aws_knows_what_was_created(account: Account) -> None:
    """EC2 is eventually consistent: the next call may not know a new group yet. The first answer about the
    group is lost after it was created, and botocore repeats the call: AWS answers Duplicate. Capacity is
    decided by the launch, whatever the dry run answers."""
    faults = account.faults
    faults.lose_answer("CreateSecurityGroup")
    faults.fail("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound", times=2)
    faults.fail("RunInstances (dry run)", "InsufficientInstanceCapacity")
    faults.fail("RunInstances", "InvalidSecurityGroupID.NotFound", times=2)
    assert len(account.up(nodes=1)) == 1
    expected = {"CreateSecurityGroup": 2, "AuthorizeSecurityGroupIngress": 3, "RunInstances": 3}
    assert {action: faults.count(action) for action in expected} == expected
    account.down()


def test_nodes_are_tagged_where_ec2_has_not_numbered_them(account: Account) -> None:
    """EC2 documents unique launch indexes for RunInstances, and always 0 for Auto Scaling and fleets.
    tests/unit/test_rank_assignment.py has the ranks after a node has ended."""
    for action in ("RunInstances", "DescribeInstances"):
        account.faults.rewrite(
            action, lambda body: re.sub(rb"<amiLaunchIndex>\d+<", b"<amiLaunchIndex>0<", body)
        )
    nodes = account.up(nodes=2)
    where = [{"Name": "key", "Values": ["cloudddp:node-rank"]}, {"Name": "resource-id", "Values": nodes}]
    tags = account.ec2.describe_tags(Filters=where)["Tags"]
    assert [{one["ResourceId"]: one["Value"] for one in tags}[node] for node in nodes] == ["0", "1"]
    account.down()


def test_failed_rollback_exits_3(account: Account) -> None:
    account.faults.fail("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    account.faults.fail("DeleteSecurityGroup", "UnauthorizedOperation", times=20)
    error = account.failed_up(nodes=1)
    assert error.exit_code == 3
    (group,) = [one for one in account.listed() if one.startswith("sg-")]
    assert group in error.message
    account.faults.clear()
    account.down()


def test_nodes_without_visible_tags_are_terminated_by_id(cli: Any, faults: Any, remains: Any) -> None:
    faults.rewrite("DescribeInstances", without_element("reservationSet"))
    interrupted_at_call(cli, faults, "RunInstances", "up", "-n", "2")
    assert not remains().instances


def test_node_without_ssh_is_not_left_running(cli: Any, faults: Any, remains: Any) -> None:
    faults.rewrite("DescribeInstances", lambda body: re.sub(rb"127\.\d+\.128\.\d+", b"127.1.2.3", body))
    began = time.monotonic()
    done = cli("up", "-n", "1", CLOUDDDP_READY_MINUTES="0.05")
    took = time.monotonic() - began
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    (tried,) = re.findall(r"gave up after (\d+) s", done.stderr)
    assert 3 <= int(tried) <= took + 1
    assert "every node was removed" in done.stderr
    assert "for an image that boots more slowly, set a larger ready_minutes" in done.stderr
    assert "`cloudddp status`" not in done.stderr  # the node no longer exists
    assert remains().nothing


def test_number_of_aws_calls_is_independent_of_nodes(tmp_path: Any) -> None:
    """Counted in a dry run, where instances run at once, so that no poll adds calls."""
    pytest.importorskip("moto")
    from cloudddp.aws.client import AWS
    from cloudddp.cli.actions.rehearsal import PrintingRunner
    from cloudddp.cluster import up
    from cloudddp.cluster.connect import Reach
    from cloudddp.config.cluster_spec import ClusterSpec
    from cloudddp.simulator.aws import rehearse

    counts = {}
    with rehearse(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDDDP_HOME", str(tmp_path))
        for nodes in (2, 8):
            calls: list[str] = []
            aws = AWS(region="us-east-1", observe=lambda _, method, *__, calls=calls: calls.append(method))
            result = up.up(
                [aws],
                ClusterSpec(name=f"n{nodes}", nodes=nodes),
                up.Callbacks(lambda _: None),
                reach=Reach(
                    lambda found, *_: PrintingRunner(found, gpus=1, cpus=4),
                    ssh_sources=lambda *_: ("203.0.113.7/32",),
                ),
            )
            assert len(result.cluster.nodes) == nodes
            counts[nodes] = len(calls)
    assert counts == {2: 21, 8: 21}
