"""The dry run of a launch, and what is said about nodes that EC2 has ended."""

from __future__ import annotations

import pytest

from cloudddp.cluster.preconditions import dry_run_parameters, hint_of_end, require_key_region
from cloudddp.cluster.requests import Ref
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError

GROUP = Ref("security-group", "GroupId")


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
        (
            "alias/x",
            "Client.InternalError",
            "Client.InternalError: Client error on launch",
            "KMS key alias/x",
        ),
        (
            None,
            "Client.InternalError",
            "Client.InternalError: Client error on launch",
            "the account's KMS key",
        ),
        ("alias/x", "", "Client.InvalidKMSKey.InvalidState: The KMS key", "KMS key alias/x"),
        ("alias/x", "Server.InternalError", "Server.InternalError: Internal error on launch", ""),
        ("alias/x", "Client.VolumeLimitExceeded", "Client.VolumeLimitExceeded: Volume limit exceeded", ""),
        ("alias/x", "", "", ""),
    ],
)
def test_hint_names_the_key_where_it_is_the_cause(
    key: str | None, code: str, message: str, expected: str
) -> None:
    hint = hint_of_end(ClusterSpec(kms_key=key), code, message)
    assert expected in hint
    assert ("kms:CreateGrant" in hint) == bool(expected)


@pytest.mark.parametrize("key", [None, "alias/x", "mrk-1234abcd12ab34cd56ef1234567890ab"])
def test_key_without_a_region_is_accepted_in_any(key: str | None) -> None:
    require_key_region(ClusterSpec(kms_key=key), "eu-west-1")


def test_key_of_another_region_is_refused() -> None:
    arn = "arn:aws:kms:us-east-1:123456789012:alias/x"
    require_key_region(ClusterSpec(kms_key=arn), "us-east-1")
    with pytest.raises(UsageError, match="is a key in us-east-1, and the cluster would be in eu-west-1"):
        require_key_region(ClusterSpec(kms_key=arn), "eu-west-1")
