"""Limits on tags: a request that breaks one has no effect."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account, refused


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
