"""Images, launches, groups and volumes, with boto3: the same for the server and for AWS in process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from support.account import Account
from support.harness import until
from support.simlab import IMAGE_PARAMETER, make_key

from cloudddp.sim.aws import rehearse

Client = Callable[[str], Any]


@pytest.fixture
def client(account: Account) -> Client:
    return account.client


def instances(ec2: Any, **filters: str) -> list[dict[str, Any]]:
    """Return the instances that are not terminated."""
    wanted = [{"Name": name, "Values": [value]} for name, value in filters.items()]
    wanted.append(
        {"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down", "stopped"]}
    )
    answer = ec2.describe_instances(Filters=wanted)
    return [instance for part in answer["Reservations"] for instance in part["Instances"]]


def launch(client: Client, count: int = 1, **more: Any) -> list[dict[str, Any]]:
    image = client("ssm").get_parameter(Name=IMAGE_PARAMETER)["Parameter"]["Value"]
    request = {"ImageId": image, "InstanceType": "g5.xlarge", **more}
    return client("ec2").run_instances(MinCount=count, MaxCount=count, **request)["Instances"]


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return error.value.response["Error"]["Code"]


def tags(cluster: str) -> list[dict[str, str]]:
    return [
        {"Key": "cloudddp:cluster", "Value": cluster},
        {"Key": "cloudddp:cluster-id", "Value": f"id-{cluster}"},
    ]


@pytest.mark.over_http
@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_ssm_parameters_name_the_deep_learning_images(client: Client, architecture: str) -> None:
    name = IMAGE_PARAMETER.replace("x86_64", architecture)
    image_id = client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    (image,) = client("ec2").describe_images(ImageIds=[image_id])["Images"]
    assert image["Architecture"] == architecture
    assert image["RootDeviceName"] == "/dev/sda1"
    assert image["OwnerId"] == "898082745236"
    assert image["CreationDate"].startswith("2026-08-22T")
    assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75


@pytest.mark.over_http
def test_images_by_owner_and_name(client: Client) -> None:
    wanted = [{"Name": "name", "Values": ["Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) *"]}]
    for owner in ("amazon", "898082745236"):
        (image,) = client("ec2").describe_images(Owners=[owner], Filters=wanted)["Images"]
        assert image["Architecture"] == "x86_64"


def test_unknown_parameter_is_not_found(client: Client) -> None:
    with pytest.raises(ClientError) as error:
        client("ssm").get_parameter(Name="/aws/service/deeplearning/ami/x86_64/none/latest/ami-id")
    assert code(error) == "ParameterNotFound"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
        ({"InstanceType": "g5.tiny"}, "InvalidParameterValue"),
        ({"KeyName": "unknown"}, "InvalidKeyPair.NotFound"),
        ({"SecurityGroupIds": ["sg-0123456789abcdef0"]}, "InvalidGroup.NotFound"),
        (
            {"NetworkInterfaces": [{"DeviceIndex": 0, "Groups": ["sg-0123456789abcdef0"]}]},
            "InvalidGroup.NotFound",
        ),
    ],
)
def test_launch_with_unknown_id_leaves_nothing(
    client: Client, request_: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ClientError) as error:
        launch(client, 2, **request_)
    assert code(error) == expected
    assert instances(client("ec2")) == []
    assert client("ec2").describe_network_interfaces()["NetworkInterfaces"] == []


def test_root_volume_smaller_than_the_image_is_rejected(client: Client) -> None:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 74, "VolumeType": "gp3"}}
    with pytest.raises(ClientError) as error:
        launch(client, BlockDeviceMappings=[disk])
    assert code(error) == "InvalidBlockDeviceMapping"
    assert "expect size >= 75GB" in str(error.value)


def test_launch_indexes_start_at_zero(client: Client) -> None:
    assert [instance["AmiLaunchIndex"] for instance in launch(client, 5)] == [0, 1, 2, 3, 4]


def test_instance_without_subnet_uses_a_default_subnet(client: Client) -> None:
    (instance,) = launch(client)
    (subnet,) = client("ec2").describe_subnets(SubnetIds=[instance["SubnetId"]])["Subnets"]
    assert subnet["DefaultForAz"]
    assert [group["GroupName"] for group in instance["SecurityGroups"]] == ["default"]


@pytest.mark.over_http
def test_resources_of_a_launch_are_tagged(client: Client) -> None:
    ec2 = client("ec2")
    group = ec2.create_security_group(
        GroupName="tagged",
        Description="d",
        TagSpecifications=[{"ResourceType": "security-group", "Tags": tags("a")}],
    )["GroupId"]
    ec2.import_key_pair(
        KeyName="tagged",
        PublicKeyMaterial=make_key().public.encode(),
        TagSpecifications=[{"ResourceType": "key-pair", "Tags": tags("a")}],
    )
    kinds = ("instance", "volume", "network-interface")
    launch(client)
    (ours,) = launch(
        client,
        SecurityGroupIds=[group],
        TagSpecifications=[{"ResourceType": kind, "Tags": tags("a")} for kind in kinds],
    )
    for name, value in (("tag:cloudddp:cluster", "a"), ("tag:cloudddp:cluster-id", "id-a")):
        wanted = [{"Name": name, "Values": [value]}]
        assert [i["InstanceId"] for i in instances(ec2, **{name: value})] == [ours["InstanceId"]]
        assert [g["GroupId"] for g in ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]] == [
            group
        ]
        assert [k["KeyName"] for k in ec2.describe_key_pairs(Filters=wanted)["KeyPairs"]] == ["tagged"]
        (volume,) = ec2.describe_volumes(Filters=wanted)["Volumes"]
        assert volume["Attachments"][0]["InstanceId"] == ours["InstanceId"]
        assert volume["Size"] == 75
        (interface,) = ec2.describe_network_interfaces(Filters=wanted)["NetworkInterfaces"]
        assert interface["Attachment"]["InstanceId"] == ours["InstanceId"]
    assert ec2.describe_volumes(Filters=[{"Name": "tag:cloudddp:cluster", "Values": ["b"]}])["Volumes"] == []
    _end(ec2, ours)
    ec2.delete_key_pair(KeyName="tagged")
    ec2.delete_security_group(GroupId=group)


def _end(ec2: Any, instance: dict[str, Any]) -> None:
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: instance["InstanceId"] not in [i["InstanceId"] for i in instances(ec2)])


@pytest.mark.parametrize("through", ["instance", "interface"])
def test_group_in_use_cannot_be_deleted(client: Client, through: str) -> None:
    ec2 = client("ec2")
    group = ec2.create_security_group(GroupName="held", Description="d")["GroupId"]
    if through == "instance":
        (instance,) = launch(client, SecurityGroupIds=[group])
    else:
        (instance,) = launch(client, NetworkInterfaces=[{"DeviceIndex": 0, "Groups": [group]}])
    assert [g["GroupId"] for g in instance["SecurityGroups"]] == [group]
    with pytest.raises(ClientError) as error:
        ec2.delete_security_group(GroupId=group)
    assert code(error) == "DependencyViolation"
    _end(ec2, instance)
    ec2.delete_security_group(GroupId=group)
    with pytest.raises(ClientError) as error:
        ec2.describe_security_groups(GroupIds=[group])
    assert code(error) == "InvalidGroup.NotFound"


def test_group_referenced_by_others_cannot_be_deleted(
    client: Client,
) -> None:
    ec2 = client("ec2")
    first, second = (
        ec2.create_security_group(GroupName=name, Description="d")["GroupId"] for name in ("first", "second")
    )
    for group in (first, second):
        pairs = [{"GroupId": first}]
        ec2.authorize_security_group_ingress(
            GroupId=group, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": pairs}]
        )
    with pytest.raises(ClientError) as error:
        ec2.delete_security_group(GroupId=first)
    assert code(error) == "DependencyViolation"
    ec2.delete_security_group(GroupId=second)
    ec2.delete_security_group(GroupId=first)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "Encrypted": True}}]},
        {"NetworkInterfaces": [{"DeviceIndex": 0, "DeleteOnTermination": True}]},
        {
            "InstanceType": "p4d.24xlarge",
            "NetworkInterfaces": [
                {"DeviceIndex": 0},
                {"DeviceIndex": 1},
                {"DeviceIndex": 1, "NetworkCardIndex": 1},
                {"DeviceIndex": 1, "NetworkCardIndex": 2, "InterfaceType": "efa-only"},
            ],
        },
    ],
)
def test_terminated_instance_leaves_no_resources(client: Client, shape: dict[str, Any]) -> None:
    ec2 = client("ec2")
    (instance,) = launch(client, **shape)
    assert ec2.describe_volumes()["Volumes"]
    assert ec2.describe_network_interfaces()["NetworkInterfaces"]
    _end(ec2, instance)
    assert ec2.describe_volumes()["Volumes"] == []
    assert ec2.describe_network_interfaces()["NetworkInterfaces"] == []
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


def test_volume_without_delete_on_termination_remains(client: Client) -> None:
    ec2 = client("ec2")
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80, "DeleteOnTermination": False}}
    (instance,) = launch(client, BlockDeviceMappings=[disk])
    _end(ec2, instance)
    (volume,) = ec2.describe_volumes()["Volumes"]
    assert (volume["State"], volume["Size"]) == ("available", 80)
    ec2.delete_volume(VolumeId=volume["VolumeId"])


@pytest.mark.over_http
def test_terminating_an_unknown_instance_has_no_effect(client: Client) -> None:
    ec2 = client("ec2")
    (instance,) = launch(client)
    with pytest.raises(ClientError) as error:
        ec2.terminate_instances(InstanceIds=[instance["InstanceId"], "i-0123456789abcdef0"])
    assert code(error) == "InvalidInstanceID.NotFound"
    assert len(instances(ec2)) == 1


def test_rehearse_runs_instances_at_once_and_restores_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    before = dict(os.environ)
    with rehearse():
        (instance,) = launch(boto3.client)
        (instance,) = instances(boto3.client("ec2"))
        assert instance["State"]["Name"] == "running"
        assert instance["PrivateIpAddress"].startswith("172.31.")
        assert boto3.client("ec2").meta.region_name == before.get("AWS_REGION", "us-east-1")
    assert dict(os.environ) == before


def test_rehearsals_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with rehearse():
        launch(boto3.client)
        assert boto3.client("ec2").meta.region_name == "eu-west-1"
    with rehearse():
        assert instances(boto3.client("ec2")) == []


@pytest.mark.over_http
@pytest.mark.parametrize("text", ["a\x01b", "\x00", "bell\x07", "\x1b[31m", "\ufffe"])
def test_characters_that_xml_cannot_represent_are_rejected(client: Client, text: str) -> None:
    ec2 = client("ec2")
    kept = launch(client)[0]["InstanceId"]

    def refused(call: Callable[..., Any], **request: Any) -> None:
        with pytest.raises(ClientError, match="InvalidParameterValue") as error:
            call(**request)
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
        assert text not in error.value.response["Error"]["Message"]

    refused(ec2.create_tags, Resources=[kept], Tags=[{"Key": "a", "Value": text}])
    refused(ec2.create_tags, Resources=[kept], Tags=[{"Key": text, "Value": "a"}])
    refused(ec2.create_security_group, GroupName="a", Description=text)
    with pytest.raises(ClientError, match="InvalidParameterValue"):
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": text}]}]
        launch(client, TagSpecifications=tags)
    (found,) = instances(ec2)
    assert found["InstanceId"] == kept
    assert "Tags" not in found


@pytest.mark.over_http
def test_other_characters_are_kept(client: Client) -> None:
    ec2 = client("ec2")
    (instance,) = launch(client, UserData=b"\x00\x01 any bytes")
    text = "tab\tline\nüñ \U0001f600 <&>\"' \u00a0\u007f"
    ec2.create_tags(Resources=[instance["InstanceId"]], Tags=[{"Key": "a", "Value": text}])
    (found,) = instances(ec2)
    assert found["Tags"] == [{"Key": "a", "Value": text}]
