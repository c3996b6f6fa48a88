"""Images, launches, groups and volumes: the same for the server and for AWS in process."""

from __future__ import annotations

import os
from typing import Any

import boto3
import pytest
from support.account import Account, refused
from support.simlab import IMAGE_PARAMETER

from cloudddp.simulator.aws import rehearse


@pytest.mark.over_http
def test_ssm_parameters_name_the_deep_learning_images(account: Account) -> None:
    for architecture in ("x86_64", "arm64"):
        name = IMAGE_PARAMETER.replace("x86_64", architecture)
        image_id = account.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
        (image,) = account.ec2.describe_images(ImageIds=[image_id])["Images"]
        assert image["Architecture"] == architecture
        assert image["RootDeviceName"] == "/dev/sda1"
        assert image["OwnerId"] == "898082745236"
        assert image["CreationDate"].startswith("2026-08-22T")
        assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75


def disk(**ebs: int) -> dict[str, Any]:
    return {
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", **ebs}}
        ]
    }


IN_NO_GROUP = [{"DeviceIndex": 0, "Groups": ["sg-0123456789abcdef0"]}]


@pytest.mark.parametrize(
    ("request_", "expected", "message"),
    [
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound", ""),
        ({"InstanceType": "g5.tiny"}, "InvalidParameterValue", ""),
        ({"KeyName": "unknown"}, "InvalidKeyPair.NotFound", ""),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidGroup.NotFound", ""),
        ({"NetworkInterfaces": IN_NO_GROUP}, "InvalidGroup.NotFound", ""),
        ({"UserData": "x" * 16385}, "InvalidParameterValue", "User data is limited to 16384 bytes"),
        (disk(VolumeSize=74), "InvalidBlockDeviceMapping", "expect size >= 75GB"),
        # gp3 has 0.25 MiB/s for each of its IOPS, of which 3000 are the default (EBS User Guide, gp3).
        (
            disk(Throughput=1000),
            "InvalidParameterValue",
            "ratio of 0.333333 is too high; maximum is 0.250000",
        ),
        (disk(Throughput=2001, Iops=16000), "InvalidParameterValue", "maximum is 2000"),
        (disk(Throughput=100), "InvalidParameterValue", "minimum is 125"),
    ],
)
def test_launch_that_is_refused_leaves_nothing(
    account: Account, request_: dict[str, Any], expected: str, message: str
) -> None:
    with refused(expected) as refusal:
        account.launch(2, **request_)
    assert message in refusal.message
    assert account.instances() == []
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_performance_of_volumes_and_cpu_credits(account: Account) -> None:
    """Credits are `unlimited`, which is billed, by default for T types but T2."""
    fast = {"Iops": 6000, "Throughput": 500, "VolumeInitializationRate": 300}
    standard = {"CreditSpecification": {"CpuCredits": "standard"}}
    for kind, given, more, volume, credits_ in (
        ("t3.large", {}, {}, (3000, 125, 0), "unlimited"),
        ("t3.large", fast, standard, (6000, 500, 300), "standard"),
        ("t2.large", {}, {"UserData": "x" * 16384}, (3000, 125, 0), "standard"),
    ):
        (instance,) = account.launch(InstanceType=kind, **disk(**given), **more)
        ids = [instance["InstanceId"]]
        wanted = [{"Name": "attachment.instance-id", "Values": ids}]
        (found,) = account.ec2.describe_volumes(Filters=wanted)["Volumes"]
        assert (found["Iops"], found["Throughput"], found.get("VolumeInitializationRate") or 0) == volume
        answer = account.ec2.describe_instance_credit_specifications(InstanceIds=ids)
        assert answer["InstanceCreditSpecifications"] == [{"InstanceId": ids[0], "CpuCredits": credits_}]


def test_group_in_use_cannot_be_deleted(account: Account) -> None:
    """By instances, or by rules of other groups."""
    ec2 = account.ec2
    first, second = (
        ec2.create_security_group(GroupName=name, Description="d")["GroupId"] for name in ("first", "second")
    )
    for group in (first, second):
        rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": first}]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    with refused("DependencyViolation"):
        ec2.delete_security_group(GroupId=first)
    (instance,) = account.launch(SecurityGroupIds=[second])
    assert [g["GroupId"] for g in instance["SecurityGroups"]] == [second]
    with refused("DependencyViolation"):
        ec2.delete_security_group(GroupId=second)
    account.end(instance["InstanceId"])
    for group in (second, first):
        ec2.delete_security_group(GroupId=group)
        with refused("InvalidGroup.NotFound"):
            ec2.describe_security_groups(GroupIds=[group])


def test_rehearsal_runs_instances_at_once_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    before = dict(os.environ)
    for _ in range(2):
        with rehearse():
            account = Account(boto3.client, dict)
            assert account.instances() == []
            account.launch()
            (instance,) = account.instances()
            assert instance["State"]["Name"] == "running"
            assert instance["PrivateIpAddress"].startswith("172.31.")
            assert account.ec2.meta.region_name == "eu-west-1"
        assert dict(os.environ) == before


@pytest.mark.over_http
def test_characters_that_xml_cannot_represent_are_rejected_and_others_kept(account: Account) -> None:
    (instance,) = account.launch(UserData=b"\x00\x01 any bytes")
    ids = [instance["InstanceId"]]
    for text in ("a\x01b", "\x00", "\x1b[31m", "\ufffe"):
        for call in (
            lambda text=text: account.ec2.create_tags(Resources=ids, Tags=[{"Key": "a", "Value": text}]),
            lambda text=text: account.ec2.create_tags(Resources=ids, Tags=[{"Key": text, "Value": "a"}]),
            lambda text=text: account.ec2.create_security_group(GroupName="a", Description=text),
            lambda text=text: account.launch(
                TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": text}]}]
            ),
        ):
            with refused("InvalidParameterValue") as refusal:
                call()
            assert refusal.status == 400
            assert text not in refusal.message
    (found,) = account.instances()
    assert "Tags" not in found
    text = "tab\tline\nüñ \U0001f600 <&>\"' \u00a0\u007f"
    account.ec2.create_tags(Resources=ids, Tags=[{"Key": "a", "Value": text}])
    assert account.describe(ids[0])["Tags"] == [{"Key": "a", "Value": text}]


# -- limits of tags: a request that breaks one has no effect -----------------------------------------


def tagged(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}]


def test_keys_of_aws_are_reserved(account: Account) -> None:
    for key in ("aws:team", "AWS:team", "Aws:"):
        with refused("InvalidParameterValue") as refusal:
            account.launch(TagSpecifications=tagged("instance", {key: "x"}))
        assert "Tag keys starting with 'aws:' are reserved for internal use" in refusal.message
    assert account.instances() == []
    with refused("InvalidParameterValue"):
        account.ec2.create_security_group(
            GroupName="g", Description="g", TagSpecifications=tagged("security-group", {"aws:team": "x"})
        )
    (instance,) = account.launch(TagSpecifications=tagged("instance", {"awsome": "aws:", "Team:aws": ""}))
    found = {tag["Key"]: tag["Value"] for tag in account.describe(instance["InstanceId"])["Tags"]}
    assert found == {"awsome": "aws:", "Team:aws": ""}


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        ({f"key{number}": "x" for number in range(51)}, "TagLimitExceeded"),
        ({"k" * 128: "x"}, "InvalidParameterValue"),
        ({"k": "v" * 257}, "InvalidParameterValue"),
        ({"": "x"}, "InvalidParameterValue"),
    ],
)
def test_number_and_length_of_tags_are_limited(account: Account, tags: dict[str, str], code: str) -> None:
    with refused(code):
        account.launch(TagSpecifications=tagged("instance", tags))
    assert account.instances() == []


@pytest.mark.over_http
def test_longest_tags_and_fifty_of_them_are_allowed(account: Account) -> None:
    tags = {f"{number:02}" + "k" * 125: "ä" * 256 for number in range(50)}
    (instance,) = account.launch(TagSpecifications=tagged("instance", tags))
    found = {tag["Key"]: tag["Value"] for tag in account.describe(instance["InstanceId"])["Tags"]}
    assert found == tags
