"""The service control policy of an organization that demands tags and encryption, and denies types and
regions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAG = "CostCenter"
REGION = "us-east-1"
CREATED_BY_LAUNCH = ("instance", "volume", "network-interface")
_WITHOUT_TAG = {"Null": {f"aws:RequestTag/{TAG}": "true"}}


def _arns(*kinds: str) -> list[str]:
    return [f"arn:aws:ec2:*:*:{kind}/*" for kind in kinds]


STATEMENTS: list[dict[str, Any]] = [
    {"Sid": "Everything", "Effect": "Allow", "Action": "*", "Resource": "*"},
    {
        "Sid": "Encryption",
        "Effect": "Deny",
        "Action": "ec2:RunInstances",
        "Resource": _arns("volume"),
        "Condition": {"Bool": {"ec2:Encrypted": "false"}},
    },
    {
        "Sid": "TagsOfLaunch",
        "Effect": "Deny",
        "Action": "ec2:RunInstances",
        "Resource": _arns(*CREATED_BY_LAUNCH),
        "Condition": _WITHOUT_TAG,
    },
    {
        "Sid": "TagsOfOthers",
        "Effect": "Deny",
        "Action": ["ec2:CreateSecurityGroup", "ec2:ImportKeyPair"],
        "Resource": _arns("security-group", "key-pair"),
        "Condition": _WITHOUT_TAG,
    },
    {
        "Sid": "Types",
        "Effect": "Deny",
        "Action": "ec2:RunInstances",
        "Resource": _arns("instance"),
        "Condition": {"StringLike": {"ec2:InstanceType": "p5*"}},
    },
    {
        "Sid": "Metadata",
        "Effect": "Deny",
        "Action": "ec2:RunInstances",
        "Resource": _arns("instance"),
        "Condition": {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}},
    },
    {
        "Sid": "Regions",
        "Effect": "Deny",
        "NotAction": ["sts:*"],
        "Resource": "*",
        "Condition": {"StringNotEquals": {"aws:RequestedRegion": [REGION]}},
    },
]


def write(folder: Path, *without: str) -> Path:
    """Write the policy, less the statements with these ids, and return its path."""
    path = folder / "organization.json"
    kept = [one for one in STATEMENTS if one["Sid"] not in without]
    path.write_text(json.dumps({"Version": "2012-10-17", "Statement": kept}))
    return path
