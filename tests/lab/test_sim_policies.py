"""`sim start --policy` and `--scp`: calls are allowed and denied as on AWS, with AWS's errors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.account import refused
from support.simlab import IMAGE_PARAMETER, client_of

from cloudddp.errors import UsageError
from cloudddp.simulator import control
from cloudddp.simulator.iam.ec2 import authorization

TAGS = [{"Key": "team", "Value": "vision"}]
KINDS = ("instance", "volume", "network-interface")
TAGGED = {"StringEquals": {"aws:RequestTag/team": "vision"}}
MINE = {"StringEquals": {"aws:ResourceTag/team": "vision"}}
CREATED = ["instance", "volume", "network-interface"]
USED = ["image", "subnet", "security-group", "key-pair"]

POLICY = [
    {"Sid": "Read", "Action": ["ec2:Describe*", "sts:Decode*"], "Resource": "*"},
    {"Sid": "Image", "Action": "ssm:GetParameter", "Resource": "arn:aws:ssm:*::parameter/aws/service/*"},
    {
        "Sid": "Use",
        "Action": "ec2:RunInstances",
        "Resource": [f"arn:aws:ec2:*:*:{kind}/*" for kind in USED],
    },
    {
        "Sid": "Launch",
        "Action": "ec2:RunInstances",
        "Resource": [f"arn:aws:ec2:*:*:{kind}/*" for kind in CREATED],
        "Condition": TAGGED,
    },
    {
        "Sid": "Tag",
        "Action": "ec2:CreateTags",
        "Resource": "*",
        "Condition": {**TAGGED, "StringLike": {"ec2:CreateAction": ["Run*", "ImportKeyPair", "Create*"]}},
    },
    {"Sid": "Create", "Action": ["ec2:ImportKeyPair", "ec2:CreateSecurityGroup"], "Resource": "*"},
    {"Sid": "End", "Action": ["ec2:TerminateInstances", "ec2:Delete*"], "Resource": "*", "Condition": MINE},
    {
        "Sid": "NoP5",
        "Effect": "Deny",
        "Action": "*",
        "Resource": "*",
        "Condition": {"StringLike": {"ec2:InstanceType": "p5*"}},
    },
]
SCP = [
    {"Action": "*", "Resource": "*"},
    {
        "Effect": "Deny",
        "Action": "ec2:RunInstances",
        "Resource": "arn:aws:ec2:*:*:volume/*",
        "Condition": {"Bool": {"ec2:Encrypted": "false"}},
    },
    {
        "Effect": "Deny",
        "NotAction": ["sts:*"],
        "Resource": "*",
        "Condition": {"StringNotEquals": {"aws:RequestedRegion": ["us-east-1"]}},
    },
]
ENCRYPTED = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80, "VolumeType": "gp3", "Encrypted": True}}]


def write(path: Path, statements: list[dict[str, Any]]) -> Path:
    document = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **one} for one in statements]}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    home = tmp_path_factory.mktemp("limited")
    policies = {"policy": write(home / "policy.json", POLICY), "scp": write(home / "scp.json", SCP)}
    yield control.start(home, nodes="process", policies=policies)
    control.stop(home)


def client(sim: control.Simulator, service: str, region: str = "") -> Any:
    """A client with the simulator's own key, which the policy limits."""
    names = control.environment(sim)
    return boto3.client(
        service,
        endpoint_url=sim.endpoint,
        region_name=region or sim.region,
        aws_access_key_id=names["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=names["AWS_SECRET_ACCESS_KEY"],
    )


@pytest.fixture
def ec2(limited: control.Simulator) -> Any:
    return client(limited, "ec2")


@pytest.fixture
def request_of(limited: control.Simulator, ec2: Any) -> dict[str, Any]:
    """A launch that the policy and the SCP allow."""
    image = client(limited, "ssm").get_parameter(Name=IMAGE_PARAMETER)["Parameter"]["Value"]
    return {
        "ImageId": image,
        "InstanceType": "g5.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "SubnetId": ec2.describe_subnets()["Subnets"][0]["SubnetId"],
        "BlockDeviceMappings": ENCRYPTED,
        "TagSpecifications": [{"ResourceType": kind, "Tags": TAGS} for kind in KINDS],
    }


@contextlib.contextmanager
def denied(action: str, on: str, why: str) -> Iterator[None]:
    """Expect EC2's refusal of an action on a resource, with an encoded message."""
    with refused("UnauthorizedOperation") as refusal:
        yield
    assert refusal.status == 403
    text, _, encoded = refusal.message.partition(". Encoded authorization failure message: ")
    assert text == (
        "You are not authorized to perform this operation. User: arn:aws:sts::123456789012:user/moto is not "
        f"authorized to perform: {action} on resource: {on} {why}"
    )
    assert encoded


NO_ALLOW = "because no identity-based policy allows the {} action"
OF_ACCOUNT = "arn:aws:ec2:us-east-1:123456789012:"


def test_allowed_launch_and_termination(ec2: Any, request_of: dict[str, Any]) -> None:
    (instance,) = ec2.run_instances(**request_of)["Instances"]
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


def test_denied_launch_names_the_resource_and_the_policy(ec2: Any, request_of: dict[str, Any]) -> None:
    untagged = [{"ResourceType": one, "Tags": TAGS} for one in KINDS if one != "volume"]
    plain = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80}}]
    for change, kind, why in (
        ({"TagSpecifications": untagged}, "volume", NO_ALLOW.format("ec2:RunInstances")),
        ({"InstanceType": "p5.48xlarge"}, "instance", "with an explicit deny in an identity-based policy"),
        ({"BlockDeviceMappings": plain}, "volume", "with an explicit deny in a service control policy"),
    ):
        with denied("ec2:RunInstances", f"{OF_ACCOUNT}{kind}/*", why):
            ec2.run_instances(**{**request_of, **change})
    running = [{"Name": "instance-state-name", "Values": ["running"]}]
    assert ec2.describe_instances(Filters=running)["Reservations"] == []


def test_only_tagged_resources_can_be_created_and_removed(limited: control.Simulator, ec2: Any) -> None:
    """An unknown id has no tags, so it is denied as well and not answered with NotFound. Without a creating
    call there is no ec2:CreateAction. A key pair is named by its name, also if the call uses the id (Service
    Authorization Reference: key-pair/${KeyPairName})."""
    administrator = client_of(limited, "ec2")
    other = administrator.create_security_group(GroupName="other", Description="d")["GroupId"]
    key = administrator.create_key_pair(KeyName="other")["KeyPairId"]
    wrong = [{"ResourceType": "security-group", "Tags": [{"Key": "team", "Value": "speech"}]}]
    unknown = "sg-00000000000000000"
    group = {"GroupName": "g", "Description": "d"}
    for action, on, call in (
        (
            "CreateTags",
            "security-group/*",
            lambda: ec2.create_security_group(**group, TagSpecifications=wrong),
        ),
        ("CreateTags", f"security-group/{other}", lambda: ec2.create_tags(Resources=[other], Tags=TAGS)),
        ("DeleteSecurityGroup", f"security-group/{other}", lambda: ec2.delete_security_group(GroupId=other)),
        (
            "DeleteSecurityGroup",
            f"security-group/{unknown}",
            lambda: ec2.delete_security_group(GroupId=unknown),
        ),
        ("DeleteKeyPair", "key-pair/other", lambda: ec2.delete_key_pair(KeyPairId=key)),
    ):
        with denied(f"ec2:{action}", OF_ACCOUNT + on, NO_ALLOW.format(f"ec2:{action}")):
            call()
    tags = [{"ResourceType": "security-group", "Tags": TAGS}]
    mine = ec2.create_security_group(**group, TagSpecifications=tags)["GroupId"]
    ec2.delete_security_group(GroupId=mine)


def test_service_control_policy_limits_every_key_and_region(limited: control.Simulator) -> None:
    elsewhere = client_of(limited, "ec2", region_name="eu-west-1")
    with refused("UnauthorizedOperation") as refusal:
        elsewhere.describe_vpcs()
    assert refusal.message.endswith(
        "is not authorized to perform: ec2:DescribeVpcs with an explicit deny in a service control policy"
    )
    assert client(limited, "sts", "eu-west-1").get_caller_identity()["Account"] == "123456789012"


def test_dry_run_answers_whether_the_call_is_allowed_and_is_recorded(
    limited: control.Simulator, ec2: Any, request_of: dict[str, Any]
) -> None:
    with refused("DryRunOperation") as refusal:
        ec2.run_instances(**request_of, DryRun=True)
    assert refusal.status == 412
    with refused("UnauthorizedOperation"):
        ec2.run_instances(**{**request_of, "InstanceType": "p5.48xlarge"}, DryRun=True)
    with refused("DryRunOperation"):  # before any other check
        ec2.run_instances(**{**request_of, "ImageId": "ami-00000000000000000"}, DryRun=True)
    recorded = control.permissions(limited)["simulated"]
    assert {"ec2:RunInstances", "ec2:CreateTags", "ssm:GetParameter"} <= recorded.keys()


def test_decode_authorization_message(
    limited: control.Simulator, ec2: Any, request_of: dict[str, Any]
) -> None:
    with refused("UnauthorizedOperation") as refusal:
        ec2.run_instances(**{**request_of, "InstanceType": "p5.48xlarge"})
    encoded = refusal.message.rpartition(" ")[2]
    sts = client(limited, "sts")
    found = json.loads(sts.decode_authorization_message(EncodedMessage=encoded)["DecodedMessage"])
    assert (found["allowed"], found["explicitDeny"]) == (False, True)
    assert found["context"]["action"] == "ec2:RunInstances"
    assert found["context"]["resource"] == f"{OF_ACCOUNT}instance/*"
    assert found["matchedStatements"]["items"][0]["statementId"] == "NoP5"
    given = {"key": "ec2:InstanceType", "values": {"items": [{"value": "p5.48xlarge"}]}}
    assert given in found["context"]["conditions"]["items"]
    with refused("InvalidAuthorizationMessageException"):
        sts.decode_authorization_message(EncodedMessage="nonsense")


def test_invalid_policy_is_refused_before_the_start(home: Path) -> None:
    policy = home / "policy.json"
    os.mkfifo(home / "pipe")
    for path, content, words in (
        (policy, None, "cannot read the policy"),
        (policy, b"\xff", "is not a policy"),
        (policy, b'{"Statement": {"Effect": "Allow", "Action": "x", "Resource": "*"}}', "has no service"),
        (home / "pipe", None, "not a regular file"),
        (home, None, "not a regular file"),
        (Path("/dev/zero"), None, "not a regular file"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=words):
            control.start(home, nodes="process", policies={"policy": path})
    assert control.find(home) is None


def test_every_known_action_is_an_operation_of_ec2() -> None:
    import botocore.session

    operations = set(botocore.session.get_session().get_service_model("ec2").operation_names)
    assert set(authorization()) <= operations
