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

from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.sim import control
from cloudddp.sim.iam.ec2 import authorization

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


def test_created_resources_need_the_tag(ec2: Any, request_of: dict[str, Any]) -> None:
    without = {
        **request_of,
        "TagSpecifications": [{"ResourceType": one, "Tags": TAGS} for one in KINDS if one != "volume"],
    }
    with denied("ec2:RunInstances", f"{OF_ACCOUNT}volume/*", NO_ALLOW.format("ec2:RunInstances")):
        ec2.run_instances(**without)
    assert (
        ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])[
            "Reservations"
        ]
        == []
    )


def test_tags_of_a_creating_call_need_create_tags(ec2: Any) -> None:
    other = [{"ResourceType": "security-group", "Tags": [{"Key": "team", "Value": "speech"}]}]
    with denied("ec2:CreateTags", f"{OF_ACCOUNT}security-group/*", NO_ALLOW.format("ec2:CreateTags")):
        ec2.create_security_group(GroupName="g", Description="d", TagSpecifications=other)


def test_tags_cannot_be_added_later(limited: control.Simulator, ec2: Any) -> None:
    """Without a creating call there is no ec2:CreateAction."""
    group = client_of(limited, "ec2").create_security_group(GroupName="untagged", Description="d")["GroupId"]
    with denied("ec2:CreateTags", f"{OF_ACCOUNT}security-group/{group}", NO_ALLOW.format("ec2:CreateTags")):
        ec2.create_tags(Resources=[group], Tags=TAGS)


def test_only_tagged_resources_can_be_removed(limited: control.Simulator, ec2: Any) -> None:
    """An unknown id has no tags, so it is denied as well instead of answered with NotFound."""
    administrator = client_of(limited, "ec2")
    other = administrator.create_security_group(GroupName="other", Description="d")["GroupId"]
    for group in (other, "sg-00000000000000000"):
        with denied(
            "ec2:DeleteSecurityGroup",
            f"{OF_ACCOUNT}security-group/{group}",
            NO_ALLOW.format("ec2:DeleteSecurityGroup"),
        ):
            ec2.delete_security_group(GroupId=group)
    tags = [{"ResourceType": "security-group", "Tags": TAGS}]
    mine = ec2.create_security_group(GroupName="mine", Description="d", TagSpecifications=tags)["GroupId"]
    ec2.delete_security_group(GroupId=mine)


def test_key_pair_is_named_by_its_name(limited: control.Simulator, ec2: Any) -> None:
    """Also if the call uses the id (Service Authorization Reference: key-pair/${KeyPairName})."""
    key = client_of(limited, "ec2").create_key_pair(KeyName="other")["KeyPairId"]
    with denied("ec2:DeleteKeyPair", f"{OF_ACCOUNT}key-pair/other", NO_ALLOW.format("ec2:DeleteKeyPair")):
        ec2.delete_key_pair(KeyPairId=key)


def test_launch_without_a_group_uses_the_default_one(
    limited: control.Simulator, tmp_path: Path, request_of: dict[str, Any]
) -> None:
    statements = [
        {**one, "Resource": [arn for arn in one["Resource"] if "security-group" not in arn]}
        if one["Sid"] == "Use"
        else one
        for one in POLICY
    ]
    home = tmp_path / "home"
    policy = write(tmp_path / "policy.json", statements)
    try:
        ec2 = client(control.start(home, nodes="process", policies={"policy": policy}), "ec2")
        subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        with refused("UnauthorizedOperation") as refusal:
            ec2.run_instances(**{**request_of, "SubnetId": subnet})
    finally:
        control.stop(home)
    assert "on resource: arn:aws:ec2:us-east-1:123456789012:security-group/sg-" in refusal.message


def test_explicit_deny_of_a_type(ec2: Any, request_of: dict[str, Any]) -> None:
    with denied(
        "ec2:RunInstances", f"{OF_ACCOUNT}instance/*", "with an explicit deny in an identity-based policy"
    ):
        ec2.run_instances(**{**request_of, "InstanceType": "p5.48xlarge"})


def test_service_control_policy_demands_encryption(ec2: Any, request_of: dict[str, Any]) -> None:
    plain = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80}}]
    with denied(
        "ec2:RunInstances", f"{OF_ACCOUNT}volume/*", "with an explicit deny in a service control policy"
    ):
        ec2.run_instances(**{**request_of, "BlockDeviceMappings": plain})


def test_service_control_policy_limits_every_key_and_region(limited: control.Simulator) -> None:
    elsewhere = client_of(limited, "ec2", region_name="eu-west-1")
    with refused("UnauthorizedOperation") as refusal:
        elsewhere.describe_vpcs()
    assert refusal.message.endswith(
        "is not authorized to perform: ec2:DescribeVpcs with an explicit deny in a service control policy"
    )
    assert client(limited, "sts", "eu-west-1").get_caller_identity()["Account"] == "123456789012"


def test_read_without_permission_has_no_encoded_message(limited: control.Simulator, ec2: Any) -> None:
    with refused("UnauthorizedOperation") as refusal:
        ec2.get_console_output(InstanceId="i-00000000000000000")
    assert "on resource: arn:aws:ec2:us-east-1:123456789012:instance/i-00000000000000000" in refusal.message
    with refused("UnauthorizedOperation") as refusal:
        ec2.get_ebs_encryption_by_default()
    assert "Encoded" not in refusal.message
    assert "on resource" not in refusal.message


@pytest.mark.parametrize(
    ("service", "call", "code", "action", "resource"),
    [
        (
            "ssm",
            ("get_parameter", {"Name": "/own/name"}),
            "AccessDeniedException",
            "ssm:GetParameter",
            " on resource: arn:aws:ssm:us-east-1:123456789012:parameter/own/name",
        ),
        (
            "service-quotas",
            ("get_service_quota", {"ServiceCode": "ec2", "QuotaCode": "L-DB2E81BA"}),
            "AccessDeniedException",
            "servicequotas:GetServiceQuota",
            " on resource: arn:aws:servicequotas:us-east-1:123456789012:ec2/L-DB2E81BA",
        ),
        (
            "pricing",
            ("get_products", {"ServiceCode": "AmazonEC2"}),
            "AccessDeniedException",
            "pricing:GetProducts",
            "",
        ),
        (
            "sts",
            ("assume_role", {"RoleArn": "arn:aws:iam::123456789012:role/r", "RoleSessionName": "session"}),
            "AccessDenied",
            "sts:AssumeRole",
            " on resource: arn:aws:iam::123456789012:role/r",
        ),
    ],
)
def test_other_services_deny_in_their_protocol(
    limited: control.Simulator,
    service: str,
    call: tuple[str, dict[str, Any]],
    code: str,
    action: str,
    resource: str,
) -> None:
    method, arguments = call
    with refused(code) as refusal:
        getattr(client(limited, service), method)(**arguments)
    assert refusal.message == (
        f"User: arn:aws:sts::123456789012:user/moto is not authorized to perform: {action}{resource} "
        f"because no identity-based policy allows the {action} action"
    )


def test_dry_run_answers_whether_the_call_is_allowed(ec2: Any, request_of: dict[str, Any]) -> None:
    with refused("DryRunOperation") as refusal:
        ec2.run_instances(**request_of, DryRun=True)
    assert refusal.status == 412
    with refused("UnauthorizedOperation"):
        ec2.run_instances(**{**request_of, "InstanceType": "p5.48xlarge"}, DryRun=True)
    with refused("DryRunOperation"):  # before any other check
        ec2.run_instances(**{**request_of, "ImageId": "ami-00000000000000000"}, DryRun=True)


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
    with refused("InvalidAuthorizationMessageException"):
        sts.decode_authorization_message(EncodedMessage="nonsense")


def test_other_keys_are_an_administrators(limited: control.Simulator) -> None:
    group = client_of(limited, "ec2").create_security_group(GroupName="free", Description="d")["GroupId"]
    client_of(limited, "ec2").delete_security_group(GroupId=group)


def test_permissions_that_calls_need_are_recorded(
    limited: control.Simulator, ec2: Any, request_of: dict[str, Any]
) -> None:
    with refused("DryRunOperation"):
        ec2.run_instances(**request_of, DryRun=True)
    client(limited, "sts").get_caller_identity()
    found = control.permissions(limited)["simulated"]
    assert {"ec2:RunInstances", "ec2:CreateTags", "sts:GetCallerIdentity", "ssm:GetParameter"} <= set(found)


def test_policy_is_an_option_of_start(home: Path) -> None:
    policy = write(home / "policy.json", [{"Action": "*", "Resource": "*"}])
    found = control.start(home, nodes="process", policies={"policy": policy})
    assert control.start(home, nodes="process") == found
    assert control.start(home, nodes="process", policies={"policy": policy}) == found
    write(policy, [{"Action": "ec2:*", "Resource": "*"}])
    for kind, words in (("policy", rf"with --policy {policy} \(sha256"), ("scp", "with no --scp")):
        with pytest.raises(CloudDDPError, match=words):
            control.start(home, nodes="process", policies={kind: policy})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"Statement": {"Effect": "Allow", "Action": "RunInstances", "Resource": "*"}}', "has no service"),
        (b"\xff", "is not a policy"),
        (None, "cannot read the policy"),
    ],
)
def test_invalid_policy_is_refused_before_the_start(home: Path, text: bytes | None, words: str) -> None:
    policy = home / "policy.json"
    if text is not None:
        policy.write_bytes(text)
    with pytest.raises(UsageError, match=words):
        control.start(home, nodes="process", policies={"policy": policy})
    assert control.find(home) is None


def test_policy_that_is_not_a_file_is_refused(home: Path) -> None:
    os.mkfifo(home / "pipe")
    for path in (home / "pipe", home, Path("/dev/zero")):
        with pytest.raises(UsageError, match="not a regular file"):
            control.start(home, nodes="process", policies={"scp": path})


def test_every_known_action_is_an_operation_of_ec2() -> None:
    import botocore.session

    operations = set(botocore.session.get_session().get_service_model("ec2").operation_names)
    assert set(authorization()) <= operations
