"""AWS's messages about denied calls, and decoded ones, as typed values."""

from __future__ import annotations

import json

import pytest

from cloudddp.aws.denials import Denial, completed, read

WHO = "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: "
INSTANCE = "arn:aws:ec2:us-east-1:123456789012:instance/*"
IDENTITY, SCP = "identity-based policy", "service control policy"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", Denial("ec2:Any")),
        ("You are not authorized to perform this operation.", Denial("ec2:Any")),
        (
            f"{WHO}ec2:CreateTags on resource: {INSTANCE} because no identity-based policy allows the "
            "ec2:CreateTags action",
            Denial("ec2:CreateTags", INSTANCE, IDENTITY),
        ),
        (
            f"{WHO}ec2:RunInstances on resource: {INSTANCE} with an explicit deny in a service control "
            "policy",
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
    decoded = {
        "allowed": False,
        "explicitDeny": True,
        "matchedStatements": {
            "items": [{"statementId": "VisualEditor0", "effect": "DENY", "conditions": {"items": []}}]
        },
        "failures": {"items": []},
        "context": {"principal": {"id": "A"}, "action": "RunInstances", "resource": INSTANCE},
    }
    found = completed(Denial("ec2:RunInstances"), json.dumps(decoded))
    assert found == Denial("ec2:RunInstances", INSTANCE, "", True, "VisualEditor0")
    passed = {**decoded, "explicitDeny": False, "context": {"action": "iam:PassRole", "resource": "arn:role"}}
    assert completed(Denial("ec2:RunInstances"), json.dumps(passed)) == Denial("iam:PassRole", "arn:role")


@pytest.mark.parametrize(
    "decoded",
    [
        "",
        "{",
        "[]",
        "null",
        '{"context": 1}',
        '{"explicitDeny": "yes"}',
        "[" * 100_000,
        '{"x": "' + "y" * 300_000 + '"}',
    ],
)
def test_other_decoded_text_adds_nothing(decoded: str) -> None:
    denial = Denial("ec2:RunInstances", INSTANCE, IDENTITY)
    assert completed(denial, decoded) == denial
