"""The dry run of a launch, AWS's messages about denied calls, and what is said of nodes that EC2 ended."""

from __future__ import annotations

import json

import pytest

from cloudddp.aws.denials import Denial, completed, read
from cloudddp.cluster.preconditions import check_settings, dry_run_parameters, hint_of_end
from cloudddp.cluster.requests import Ref
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import UsageError

GROUP, CLIENT = Ref("security-group", "GroupId"), "Client.InternalError"


def test_dry_run_keeps_what_policies_refer_to_and_omits_what_does_not_exist_yet() -> None:
    kept = {
        "ImageId": "ami-1",
        "MinCount": 2,
        "IamInstanceProfile": {"Name": "train"},
        "MetadataOptions": {"HttpTokens": "required"},
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"Encrypted": True, "KmsKeyId": "alias/x"}}
        ],
        "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}],
    }
    planned = {
        **kept,
        "KeyName": "cloudddp-x",
        "UserData": "#cloud-config",
        "ClientToken": "c-1",
        "Placement": {"GroupName": "cloudddp-x", "Tenancy": "default"},
        "NetworkInterfaces": [
            {"DeviceIndex": 0, "NetworkCardIndex": 0, "SubnetId": "subnet-1", "Groups": [GROUP]},
            {"DeviceIndex": 1, "NetworkCardIndex": 1, "SubnetId": "subnet-1", "Groups": [GROUP]},
        ],
    }
    assert dry_run_parameters(planned) == {
        **kept,
        "Placement": {"Tenancy": "default"},
        "NetworkInterfaces": [
            {"DeviceIndex": 0, "NetworkCardIndex": 0, "SubnetId": "subnet-1"},
            {"DeviceIndex": 1, "NetworkCardIndex": 1, "SubnetId": "subnet-1"},
        ],
    }


@pytest.mark.parametrize(
    ("key", "code", "message", "expected"),
    [
        ("alias/x", CLIENT, f"{CLIENT}: Client error on launch", "KMS key alias/x"),
        (None, CLIENT, f"{CLIENT}: Client error on launch", "the account's KMS key"),
        ("alias/x", "Server.InternalError", "Server.InternalError: Internal error on launch", ""),
        ("alias/x", "", "", ""),
    ],
)
def test_hint_names_the_key_where_it_is_the_cause(
    key: str | None, code: str, message: str, expected: str
) -> None:
    hint = hint_of_end(ClusterSpec(kms_key=key), code, message)
    assert expected in hint
    assert ("kms:CreateGrant" in hint) == bool(expected)


def test_key_of_another_region_is_refused_and_one_without_a_region_accepted_in_any() -> None:
    for key in (None, "alias/x", "mrk-1234abcd12ab34cd56ef1234567890ab"):
        check_settings(ClusterSpec(kms_key=key), ["eu-west-1"])
    arn = "arn:aws:kms:us-east-1:123456789012:alias/x"
    check_settings(ClusterSpec(kms_key=arn), ["us-east-1"])
    with pytest.raises(UsageError, match="is a key in us-east-1, and the cluster would be in eu-west-1"):
        check_settings(ClusterSpec(kms_key=arn), ["eu-west-1"])


WHO = "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: "
INSTANCE = "arn:aws:ec2:us-east-1:123456789012:instance/*"
IDENTITY, SCP = "identity-based policy", "service control policy"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("You are not authorized to perform this operation.", Denial("ec2:Any")),
        (
            f"{WHO}ec2:CreateTags on resource: {INSTANCE} because no identity-based policy allows the action",
            Denial("ec2:CreateTags", INSTANCE, IDENTITY),
        ),
        (
            f"{WHO}ec2:RunInstances on resource: {INSTANCE} with an explicit deny in a {SCP}",
            Denial("ec2:RunInstances", INSTANCE, SCP, True),
        ),
        (
            f"{WHO}ec2:RunInstances with an explicit deny in an identity-based policy. Encoded authorization",
            Denial("ec2:RunInstances", "", IDENTITY, True),
        ),
        (f"{WHO}sts:AssumeRole on resource: arn:\x1b[2Jx", Denial("sts:AssumeRole", "arn:\\x1b[2Jx")),
    ],
)
def test_message_is_read(message: str, expected: Denial) -> None:
    assert read(message, "ec2:Any") == expected


def test_decoded_message_completes_the_denial() -> None:
    """The form of the example in the AWS CLI's reference: its action has no service."""
    matched = {"statementId": "VisualEditor0", "effect": "DENY", "conditions": {"items": []}}
    context = {"principal": {"id": "A"}, "action": "RunInstances", "resource": INSTANCE}
    decoded = {"allowed": False, "explicitDeny": True, "failures": {"items": []}, "context": context}
    decoded["matchedStatements"] = {"items": [matched]}
    found = completed(Denial("ec2:RunInstances"), json.dumps(decoded))
    assert found == Denial("ec2:RunInstances", INSTANCE, "", True, "VisualEditor0")
    passed = {**decoded, "explicitDeny": False, "context": {"action": "iam:PassRole", "resource": "arn:role"}}
    assert completed(Denial("ec2:RunInstances"), json.dumps(passed)) == Denial("iam:PassRole", "arn:role")


@pytest.mark.parametrize(
    "decoded", ["", "{", '{"context": 1}', "[" * 100_000, '{"x": "' + "y" * 300_000 + '"}']
)
def test_other_decoded_text_adds_nothing(decoded: str) -> None:
    denial = Denial("ec2:RunInstances", INSTANCE, IDENTITY)
    assert completed(denial, decoded) == denial
