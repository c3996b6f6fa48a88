"""Calls that are throttled, rejected, delayed or lost by conditions."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from support.account import Account, post_conditions, refused
from support.harness import until

from cloudddp.simulator import control

ONCE = Config(retries={"total_max_attempts": 1})


@pytest.fixture
def ec2(remote: Account) -> Any:
    """A client without retries."""
    return remote.client("ec2", config=ONCE)


def test_throttle_affects_the_next_calls_of_an_action(remote: Account, ec2: Any) -> None:
    remote.conditions(throttle={"DescribeVpcs": 2})
    ec2.describe_subnets()
    for _ in range(2):
        with refused("RequestLimitExceeded") as refusal:
            ec2.describe_vpcs()
        assert refusal.status == 503
    assert ec2.describe_vpcs()["Vpcs"]
    assert remote.conditions()["throttle"] == {}


def test_calls_above_the_request_rate_are_throttled(remote: Account, ec2: Any) -> None:
    """EC2 Developer Guide, "Request throttling for the Amazon EC2 API": each action and region has its own
    bucket."""
    remote.conditions(request_rate={"DescribeVpcs": {"bucket": 2, "refill": 0.001}})
    for _ in range(2):
        ec2.describe_vpcs()
    with refused("RequestLimitExceeded") as refusal:
        ec2.describe_vpcs()
    assert (refusal.status, refusal.message) == (503, "Request limit exceeded.")
    ec2.describe_subnets()
    remote.client("ec2", config=ONCE, region_name="us-west-2").describe_vpcs()
    remote.conditions(request_rate={"DescribeVpcs": {"bucket": 1, "refill": 2}})
    ec2.describe_vpcs()
    with refused("RequestLimitExceeded"):
        ec2.describe_vpcs()
    time.sleep(0.5)
    ec2.describe_vpcs()


def test_region_that_is_not_enabled_refuses_every_call(remote: Account, ec2: Any) -> None:
    there = remote.client("ec2", config=ONCE, region_name="af-south-1")
    identity = remote.client("sts", config=ONCE, region_name="af-south-1")

    def statuses(**of: Any) -> dict[str, str]:
        listed = ec2.describe_regions(**of)["Regions"]
        return {one["RegionName"]: one["OptInStatus"] for one in listed}

    assert statuses()["af-south-1"] != "not-opted-in"
    remote.conditions(regions={"af-south-1": "not-opted-in"})
    for call in (there.describe_vpcs, there.describe_regions):
        with refused("AuthFailure") as refusal:
            call()
        assert refusal.status == 401
        assert refusal.message == "AWS was not able to validate the provided access credentials"
    with refused("InvalidClientTokenId"):
        identity.get_caller_identity()
    assert "not-opted-in" not in statuses().values()
    assert statuses(AllRegions=True)["af-south-1"] == "not-opted-in"
    assert statuses(RegionNames=["af-south-1"]) == {"af-south-1": "not-opted-in"}
    remote.conditions(regions={"af-south-1": None})
    assert there.describe_vpcs()["Vpcs"]
    assert "af-south-1" in statuses()


def test_capacity_that_is_missing_after_the_launch_was_accepted(remote: Account) -> None:
    """EC2 API reference, "StateReason"."""
    code = "Server.InsufficientInstanceCapacity"
    remote.conditions(fail_launch={"us-east-1a": {"code": code, "instances": 1}})
    (instance,) = remote.launch(Placement={"AvailabilityZone": "us-east-1a"})
    shown = until(lambda: [i for i in [remote.describe(instance["InstanceId"])] if i["State"]["Code"] == 48])
    text = "There was insufficient capacity available to satisfy the launch request."
    assert shown[0]["StateReason"] == {"Code": code, "Message": f"{code}: {text}"}


def test_reject_condition(remote: Account, ec2: Any) -> None:
    rule = {"code": "UnauthorizedOperation", "message": "You are not authorized <here>.", "status": 403}
    remote.conditions(reject={"CreateSecurityGroup": {**rule, "calls": 2}})
    for _ in range(2):
        with refused("UnauthorizedOperation") as refusal:
            ec2.create_security_group(GroupName="never", Description="d")
        assert (refusal.status, refusal.message) == (403, "You are not authorized <here>.")
    named = [{"Name": "group-name", "Values": ["never"]}]
    assert ec2.describe_security_groups(Filters=named)["SecurityGroups"] == []
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


def test_latency_delays_the_named_calls_only(sim: control.Simulator, remote: Account, ec2: Any) -> None:
    impatient = remote.client("ec2", config=Config(retries={"total_max_attempts": 1}, read_timeout=0.3))
    remote.conditions(latency={"DescribeVpcs": 100})  # longer than the read timeout of `ec2`
    with pytest.raises(ReadTimeoutError):
        impatient.describe_vpcs()  # times out here; the server continues
    ec2.describe_subnets()
    remote.conditions(latency={"*": 100, "DescribeVpcs": 0})
    ec2.describe_vpcs()
    assert control.nodes(sim) == []
    with pytest.raises(ReadTimeoutError):
        impatient.describe_subnets()
    remote.conditions(latency={"*": 0, "DescribeVpcs": 1})
    began = time.monotonic()
    ec2.describe_vpcs()
    assert time.monotonic() - began >= 1


def test_invalid_condition_changes_nothing(sim: control.Simulator, remote: Account) -> None:
    before = remote.conditions()
    body = {"latency": {"*": 9}, "throttle": {"RunInstance": 1}}
    status, answer = post_conditions(sim.endpoint, body)
    assert status == 400
    assert "'RunInstance'" in answer["error"]
    assert "RunInstances" in answer["known"]
    with urllib.request.urlopen(f"{sim.endpoint}/_cloudddp/conditions", timeout=300) as shown:
        assert json.load(shown) == before


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
        unlisted=dict.fromkeys(
            ("elastic-ip", "security-group", "placement-group", "key-pair", "instance"), 3600
        )
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
    (instance,) = remote.launch(TagSpecifications=tags("instance"))

    def listed() -> list[int]:
        return [
            len(ec2.describe_addresses(Filters=where)["Addresses"]),
            len(ec2.describe_security_groups(Filters=where)["SecurityGroups"]),
            len(ec2.describe_placement_groups(Filters=where)["PlacementGroups"]),
            len(ec2.describe_key_pairs(Filters=where)["KeyPairs"]),
            len(ec2.describe_instances(Filters=where)["Reservations"]),
        ]

    assert listed() == [0, 0, 0, 0, 0]
    assert remote.describe(instance["InstanceId"])["Tags"] == tagged
    assert ec2.describe_addresses(AllocationIds=[address])["Addresses"]
    assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert ec2.describe_placement_groups(GroupNames=["late"])["PlacementGroups"]
    remote.conditions(unlisted={"elastic-ip": None})
    assert listed() == [1, 0, 0, 0, 0]
    remote.conditions(clear=True)
    assert listed() == [1, 1, 1, 1, 1]
    ec2.delete_security_group(GroupId=group)
    ec2.delete_key_pair(KeyName="late")
