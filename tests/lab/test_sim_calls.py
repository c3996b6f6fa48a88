"""Calls that are throttled, rejected, delayed or lost by conditions."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from support.account import Account, refused

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


# -- idempotency of RunInstances by ClientToken, per zone ----------------------------------------------------


@pytest.fixture
def token() -> str:
    """A token that no other test uses: tokens do not expire."""
    return secrets.token_hex(16)


def ids(instances: list[dict[str, Any]]) -> list[str]:
    return [instance["InstanceId"] for instance in instances]


@pytest.mark.over_http
def test_same_token_returns_the_same_instances(account: Account, token: str) -> None:
    with refused("DryRunOperation"):
        account.launch(ClientToken=token, DryRun=True)
    first = account.running(2, ClientToken=token)
    again = account.launch(2, ClientToken=token)
    assert sorted(ids(again)) == sorted(ids(first)) == sorted(ids(account.instances()))
    assert {instance["State"]["Name"] for instance in again} == {"running"}
    assert set(ids(account.launch(2))).isdisjoint(ids(first))
    with refused("InvalidParameterValue"):
        account.launch(ClientToken="x" * 65)


def test_tokens_are_zonal(account: Account, token: str) -> None:
    request = {"ClientToken": token}
    first = account.launch(SubnetId=account.subnet("us-east-1a"), **request)
    second = account.launch(SubnetId=account.subnet("us-east-1b"), **request)
    assert ids(first) != ids(second)
    third = account.launch(
        NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": account.subnet("us-east-1c")}], **request
    )
    assert len(account.instances(client_token=token)) == 3
    assert third[0]["Placement"]["AvailabilityZone"] == "us-east-1c"


def test_parameter_mismatch_is_rejected(account: Account, token: str) -> None:
    account.launch(ClientToken=token)
    for change in ({"InstanceType": "g5.2xlarge"}, {"UserData": "other"}, {"MaxCount": 2}):
        with refused("IdempotentParameterMismatch"):
            account.launch(**{"ClientToken": token, **change})
    assert len(account.instances()) == 1


def test_concurrent_requests_with_one_token(remote: Account, token: str) -> None:
    clients = [remote.client("ec2") for _ in range(8)]

    def launch(ec2: Any) -> list[str]:
        request = {"ImageId": remote.image, "InstanceType": "g5.xlarge", "MinCount": 2, "MaxCount": 2}
        return ids(ec2.run_instances(ClientToken=token, **request)["Instances"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(launch, clients))
    assert len({tuple(answer) for answer in answers}) == 1
    assert len(remote.instances(client_token=token)) == 2


def test_lost_response_with_token(remote: Account, token: str) -> None:
    """botocore retries the call with the same token."""
    remote.conditions(lose={"RunInstances": 2})
    launched = remote.launch(2, ClientToken=token)
    assert sorted(ids(remote.instances())) == sorted(ids(launched))
    assert len(remote.instances(client_token=token)) == 2
    assert remote.conditions()["lose"] == {}
