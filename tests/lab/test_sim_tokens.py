"""Idempotency of RunInstances by ClientToken, per zone."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.account import Account, refused


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
