"""KMS keys of volumes: EC2 accepts a launch with a key that it cannot use, and ends the instances."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account
from support.harness import until

UNKNOWN = "1234abcd-12ab-34cd-56ef-1234567890ab"
NO_ACCESS = ("Client.InternalError", "Client.InternalError: Client error on launch")
WRONG_STATE = (
    "Client.InternalError",
    "Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state",
)


def encrypted(key: str) -> list[dict[str, Any]]:
    return [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "Encrypted": True, "KmsKeyId": key}}]


@pytest.fixture
def key(remote: Account) -> str:
    return str(remote.client("kms").create_key()["KeyMetadata"]["Arn"])


def how_it_ended(account: Account, key: str) -> tuple[str, str]:
    (instance,) = account.launch(BlockDeviceMappings=encrypted(key))
    until(lambda: account.describe(instance["InstanceId"])["State"]["Name"] == "terminated")
    reason = account.describe(instance["InstanceId"])["StateReason"]
    return reason["Code"], reason["Message"]


def test_instances_with_a_usable_key_run(remote: Account, key: str) -> None:
    kms = remote.client("kms")
    alias = f"alias/of-a-test-{key[-12:]}"
    kms.create_alias(AliasName=alias, TargetKeyId=key)
    for name in (key, key.rpartition("/")[2], alias, f"{key.rpartition(':')[0]}:{alias}"):
        (instance,) = remote.running(BlockDeviceMappings=encrypted(name))
        wanted = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
        (volume,) = remote.ec2.describe_volumes(Filters=wanted)["Volumes"]
        assert (volume["Encrypted"], volume["KmsKeyId"]) == (True, key)


def test_instances_with_a_key_that_they_cannot_use_terminate_and_leave_no_volume(
    remote: Account, key: str
) -> None:
    signing = remote.client("kms").create_key(KeySpec="RSA_2048", KeyUsage="SIGN_VERIFY")
    before = len(remote.ec2.describe_volumes()["Volumes"])
    for name in (
        UNKNOWN,
        "arn:aws:kms:us-east-1:123456789012:alias/unknown",
        key.replace("us-east-1", "us-west-2"),
        signing["KeyMetadata"]["KeyId"],
    ):
        assert how_it_ended(remote, name) == NO_ACCESS, name
    assert len(remote.ec2.describe_volumes()["Volumes"]) == before


def test_instances_with_a_disabled_key_terminate(remote: Account, key: str) -> None:
    kms, key_id = remote.client("kms"), key.rpartition("/")[2]  # moto accepts only ids here
    kms.disable_key(KeyId=key_id)
    assert how_it_ended(remote, key) == WRONG_STATE
    kms.enable_key(KeyId=key_id)
    kms.schedule_key_deletion(KeyId=key_id, PendingWindowInDays=7)
    assert how_it_ended(remote, key) == WRONG_STATE
