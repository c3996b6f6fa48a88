"""Calls that are throttled, rejected, delayed or lost by conditions."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from support.account import Account, post_conditions, refused

from cloudddp.sim import control
from cloudddp.sim.conditions.model import Conditions

ONCE = Config(retries={"total_max_attempts": 1})


@pytest.fixture
def ec2(remote: Account) -> Any:
    """A client without retries."""
    return remote.client("ec2", config=ONCE)


@pytest.fixture
def page(sim: control.Simulator) -> Iterator[str]:
    yield sim.endpoint
    post_conditions(sim.endpoint, {"clear": True})


def test_throttle_affects_the_next_calls_of_an_action(remote: Account, ec2: Any) -> None:
    remote.conditions(throttle={"DescribeVpcs": 2})
    ec2.describe_subnets()
    for _ in range(2):
        with refused("RequestLimitExceeded") as refusal:
            ec2.describe_vpcs()
        assert refusal.status == 503
    assert ec2.describe_vpcs()["Vpcs"]
    assert remote.conditions()["throttle"] == {}


def test_throttled_launch_has_no_effect_and_is_retried(remote: Account) -> None:
    remote.conditions(throttle={"RunInstances": 1})
    assert len(remote.launch()) == 1
    assert len(remote.instances()) == 1


def test_reject_condition(remote: Account, ec2: Any) -> None:
    rule = {"code": "UnauthorizedOperation", "message": "You are not authorized <here>.", "status": 403}
    remote.conditions(reject={"CreateSecurityGroup": {**rule, "calls": 2}})
    for _ in range(2):
        with refused("UnauthorizedOperation") as refusal:
            ec2.create_security_group(GroupName="never", Description="d")
        assert (refusal.status, refusal.message) == (403, "You are not authorized <here>.")
    assert (
        ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["never"]}])["SecurityGroups"]
        == []
    )
    ec2.create_security_group(GroupName="never", Description="d")
    ec2.delete_security_group(GroupName="never")


@pytest.mark.parametrize(
    ("service", "action", "method", "arguments"),
    [
        ("ssm", "GetParameter", "get_parameter", {"Name": "any"}),
        ("sts", "GetCallerIdentity", "get_caller_identity", {}),
    ],
)
def test_reject_in_the_protocol_of_the_service(
    remote: Account, service: str, action: str, method: str, arguments: dict[str, str]
) -> None:
    remote.conditions(reject={action: {"code": "ExpiredTokenException", "message": "late", "status": 403}})
    client = remote.client(service, config=ONCE)
    with refused("ExpiredTokenException") as refusal:
        getattr(client, method)(**arguments)
    assert (refusal.status, refusal.message) == (403, "late")


def test_lost_response_closes_the_connection_after_the_effect(remote: Account, ec2: Any) -> None:
    remote.conditions(lose={"CreatePlacementGroup": 1})
    with pytest.raises(ConnectionClosedError):
        ec2.create_placement_group(GroupName="made")
    assert len(ec2.describe_placement_groups(GroupNames=["made"])["PlacementGroups"]) == 1


def test_retry_without_token_repeats_the_effect(remote: Account) -> None:
    """This is why a program has to expect InvalidKeyPair.Duplicate."""
    remote.conditions(lose={"CreatePlacementGroup": 1})
    with refused("InvalidPlacementGroup.Duplicate"):
        remote.ec2.create_placement_group(GroupName="made")


def test_latency_condition(remote: Account, ec2: Any) -> None:
    impatient = remote.client("ec2", config=Config(retries={"total_max_attempts": 1}, read_timeout=0.3))
    remote.conditions(latency={"DescribeVpcs": 100})  # longer than the read timeout of `ec2`
    with pytest.raises(ReadTimeoutError):
        impatient.describe_vpcs()
    ec2.describe_subnets()
    remote.conditions(latency={"*": 100, "DescribeVpcs": 0})
    ec2.describe_vpcs()
    with pytest.raises(ReadTimeoutError):
        impatient.describe_subnets()
    remote.conditions(latency={"*": 0, "DescribeVpcs": 1})
    began = time.monotonic()
    ec2.describe_vpcs()
    assert time.monotonic() - began >= 1


def test_slow_call_does_not_delay_others(remote: Account, ec2: Any) -> None:
    remote.conditions(latency={"DescribeVpcs": 100})
    impatient = remote.client("ec2", config=Config(retries={"total_max_attempts": 1}, read_timeout=0.3))
    with pytest.raises(ReadTimeoutError):
        impatient.describe_vpcs()  # times out here; the server continues
    ec2.describe_subnets()


def test_conditions_are_merged_removed_and_cleared(page: str) -> None:
    post_conditions(page, {"clear": True})
    post_conditions(page, {"throttle": {"RunInstances": 2}, "quota": {"on-demand-g": 8}})
    status, shown = post_conditions(
        page, {"throttle": {"DescribeVpcs": 1}, "capacity": {"us-east-1a": {"g5.xlarge": 0}}}
    )
    assert status == 200
    assert shown == Conditions().to_json() | {
        "capacity": {"us-east-1a": {"g5.xlarge": 0}},
        "quota": {"on-demand-g": 8},
        "throttle": {"RunInstances": 2, "DescribeVpcs": 1},
    }
    with urllib.request.urlopen(f"{page}/_cloudddp/conditions", timeout=30) as answer:
        assert json.load(answer) == shown
    _, shown = post_conditions(page, {"throttle": {"RunInstances": None}, "capacity": {"us-east-1a": None}})
    assert (shown["throttle"], shown["capacity"]) == ({"DescribeVpcs": 1}, {})
    _, shown = post_conditions(page, {"clear": True, "latency": {"*": 0.5}})
    assert shown["quota"] == {}
    assert shown["latency"] == {"*": 0.5}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"capacity": {"us-east-1z": {"g5.xlarge": 0}}}, "us-east-1a"),
        ({"capacity": {"us-east-1a": {"g5.xlarg": 0}}}, "g5.xlarge"),
        ({"throttle": {"RunInstance": 1}}, "RunInstances"),
        ({"quota": {"on-demand-q": 1}}, "on-demand-g"),
        ({"capacities": {}}, "capacity"),
        ({"free_addresses": {"subnet-0": 1}}, "subnet-"),
        ({"boot": {"ssh_second": 1}}, "ssh_seconds"),
    ],
)
def test_unknown_name_changes_nothing_and_lists_known_names(
    page: str, remote: Account, body: dict[str, Any], named: str
) -> None:
    before = remote.conditions()
    status, answer = post_conditions(page, {"latency": {"*": 9}, **body})
    assert status == 400
    assert any(name.startswith(named) for name in answer["known"]), answer
    assert named in answer["error"]
    assert remote.conditions() == before


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {"throttle": {"RunInstances": 0}},
        {"throttle": {"RunInstances": True}},
        {"capacity": {"us-east-1a": {"g5.xlarge": -1}}},
        {"capacity": {"us-east-1a": 3}},
        {"capacity": 3},
        {"latency": {"*": -1}},
        {"latency": {"*": "long"}},
        {"boot": {"ssh_seconds": -1}},
        {"boot": {"failed_gpus": 0.5}},
        {"boot": {"failed_gpus": 17}},
        {"reject": {"RunInstances": {"message": "no code"}}},
        {"reject": {"RunInstances": {"code": "X", "status": 200}}},
        {"reject": {"RunInstances": {"code": "X", "colour": "red"}}},
    ],
)
def test_invalid_condition_is_rejected(page: str, remote: Account, body: Any) -> None:
    before = remote.conditions()
    status, answer = post_conditions(page, body)
    assert status == 400
    assert answer["error"]
    assert remote.conditions() == before


def test_admin_api_is_not_delayed(sim: control.Simulator, remote: Account) -> None:
    remote.conditions(latency={"*": 3600})
    assert control.nodes(sim) == []


def test_conditions_apply_to_terminate(remote: Account) -> None:
    (instance,) = remote.running()
    remote.conditions(throttle={"TerminateInstances": 1}, lose={"TerminateInstances": 1})
    remote.end(instance["InstanceId"])
    shown = remote.conditions()
    assert (shown["throttle"], shown["lose"]) == ({}, {})


def test_dry_run_is_refused_only_for_a_missing_permission(remote: Account, ec2: Any) -> None:
    launch = {"ImageId": remote.image, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    remote.conditions(
        throttle={"RunInstances": 1},
        lose={"CreateSecurityGroup": 1},
        reject={"ImportKeyPair": {"code": "InvalidKeyPair.Duplicate"}},
    )
    before = remote.conditions()
    for call in (
        lambda: ec2.run_instances(**launch, DryRun=True),
        lambda: ec2.create_security_group(GroupName="g", Description="d", DryRun=True),
        lambda: ec2.import_key_pair(KeyName="k", PublicKeyMaterial=b"k", DryRun=True),
    ):
        with refused("DryRunOperation") as refusal:
            call()
        assert refusal.status == 412
    assert remote.conditions() == before
    remote.conditions(clear=True, reject={"RunInstances": {"code": "UnauthorizedOperation", "status": 403}})
    with refused("UnauthorizedOperation"):
        ec2.run_instances(**launch, DryRun=True)
    assert remote.conditions()["reject"] == {}


def test_new_resources_are_not_listed_by_tag_yet(remote: Account) -> None:
    """EC2 API reference, "Eventual consistency": a new resource may not be visible to the next commands."""
    remote.conditions(
        unlisted=dict.fromkeys(("elastic-ip", "security-group", "placement-group", "key-pair"), 3600)
    )
    tagged = [{"Key": "late", "Value": "yes"}]

    def tags(kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": tagged}]

    ec2, where = remote.ec2, [{"Name": "tag:late", "Values": ["yes"]}]
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=tags("elastic-ip"))["AllocationId"]
    group = ec2.create_security_group(
        GroupName="late", Description="d", TagSpecifications=tags("security-group")
    )["GroupId"]
    ec2.create_placement_group(
        GroupName="late", Strategy="cluster", TagSpecifications=tags("placement-group")
    )
    ec2.create_key_pair(KeyName="late", TagSpecifications=tags("key-pair"))

    def listed() -> list[int]:
        return [
            len(ec2.describe_addresses(Filters=where)["Addresses"]),
            len(ec2.describe_security_groups(Filters=where)["SecurityGroups"]),
            len(ec2.describe_placement_groups(Filters=where)["PlacementGroups"]),
            len(ec2.describe_key_pairs(Filters=where)["KeyPairs"]),
        ]

    assert listed() == [0, 0, 0, 0]
    assert ec2.describe_addresses(AllocationIds=[address])["Addresses"]
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert ec2.describe_placement_groups(GroupNames=["late"])["PlacementGroups"]
    remote.conditions(unlisted={"elastic-ip": None})
    assert listed() == [1, 0, 0, 0]
    remote.conditions(clear=True)
    assert listed() == [1, 1, 1, 1]
    ec2.delete_security_group(GroupId=group)
    ec2.delete_key_pair(KeyName="late")
