"""Parameters of RunInstances, and filters of DescribeInstances."""

from __future__ import annotations

import json

import pytest
from support.account import Account, refused


def profile(account: Account, name: str) -> None:
    trust = {"Version": "2012-10-17", "Statement": []}
    iam = account.client("iam")
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
    iam.create_instance_profile(InstanceProfileName=name)


def test_all_instances_have_the_profile(account: Account) -> None:
    profile(account, "nodes-of-a-test")
    instances = account.launch(3, IamInstanceProfile={"Name": "nodes-of-a-test"})
    found = [account.describe(instance["InstanceId"])["IamInstanceProfile"]["Arn"] for instance in instances]
    assert len(found) == 3
    assert all(arn.endswith("instance-profile/nodes-of-a-test") for arn in found)
    with refused("InvalidParameterValue") as refusal:
        account.launch(IamInstanceProfile={"Name": "unknown"})
    assert "Invalid IAM Instance Profile name" in refusal.message
    assert len(account.instances()) == 3


def test_cpu_credits(account: Account) -> None:
    """`unlimited`, which is billed, is the default of T types but T2."""
    given = {"CreditSpecification": {"CpuCredits": "standard"}}
    found = [
        account.launch(InstanceType=name, **more)[0]["InstanceId"]
        for name, more in (("t3.large", {}), ("t3.large", given), ("t2.large", {}))
    ]
    answer = account.ec2.describe_instance_credit_specifications(InstanceIds=found)
    shown = {one["InstanceId"]: one["CpuCredits"] for one in answer["InstanceCreditSpecifications"]}
    assert [shown[name] for name in found] == ["unlimited", "standard", "standard"]


def test_volume_performance(account: Account) -> None:
    ebs = {"VolumeSize": 100, "VolumeType": "gp3", "Iops": 6000, "Throughput": 500}
    ebs["VolumeInitializationRate"] = 300
    (instance,) = account.launch(BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": ebs}])
    wanted = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
    (volume,) = account.ec2.describe_volumes(Filters=wanted)["Volumes"]
    assert (volume["Iops"], volume["Throughput"], volume["VolumeType"]) == (6000, 500, "gp3")
    assert volume["VolumeInitializationRate"] == 300
    account.launch(
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "VolumeType": "gp3"}}]
    )
    (other,) = (v for v in account.ec2.describe_volumes()["Volumes"] if v["VolumeId"] != volume["VolumeId"])
    assert (other["Iops"], other["Throughput"]) == (3000, 125)
    assert not other.get("VolumeInitializationRate")


@pytest.mark.parametrize(
    ("performance", "message"),
    [
        ({"Throughput": 1000}, "ratio of 0.333333 is too high; maximum is 0.250000 MiBps per iops"),
        ({"Throughput": 2001, "Iops": 16000}, "maximum is 2000"),
        ({"Throughput": 100}, "minimum is 125"),
    ],
)
def test_unavailable_volume_performance(account: Account, performance: dict[str, int], message: str) -> None:
    """gp3 has 0.25 MiB/s for each of its IOPS, of which 3000 are the default (EBS User Guide, gp3)."""
    ebs = {"VolumeSize": 100, "VolumeType": "gp3", **performance}
    with refused("InvalidParameterValue") as refusal:
        account.launch(BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": ebs}])
    assert message in refusal.message
    assert account.instances() == []


def test_user_data_is_limited_to_16_kib(account: Account) -> None:
    account.launch(UserData="x" * 16384)
    with refused("InvalidParameterValue") as refusal:
        account.launch(UserData="x" * 16385)
    assert refusal.message == "User data is limited to 16384 bytes"


def test_termination_protection_from_launch(account: Account) -> None:
    (instance,) = account.running(DisableApiTermination=True)
    with refused("OperationNotPermitted"):
        account.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    assert account.describe(instance["InstanceId"])["State"]["Name"] == "running"
    account.ec2.modify_instance_attribute(
        InstanceId=instance["InstanceId"], DisableApiTermination={"Value": False}
    )
    account.end(instance["InstanceId"])


def test_filters_of_instances(account: Account) -> None:
    first, second = account.launch(2)
    found = {one["InstanceId"] for one in account.instances(instance_type="g5.*")}
    assert found == {first["InstanceId"], second["InstanceId"]}
    assert account.instances(instance_type="g6.*") == []
    with refused("InvalidParameterValue") as refusal:
        account.instances(instance_type="*", colour="blue")  # the error names the unknown one
    assert "'colour'" in refusal.message
