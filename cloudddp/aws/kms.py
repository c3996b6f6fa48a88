"""KMS keys, as `doctor` checks them before EC2 uses one for the root volumes. Read-only."""

from __future__ import annotations

from cloudddp.aws.answers import Id, Record
from cloudddp.aws.client import AWS


class _Metadata(Record, frozen=True):
    key_state: Id
    key_spec: Id = "SYMMETRIC_DEFAULT"


class _DescribeKey(Record, frozen=True):
    key_metadata: _Metadata


def problem(aws: AWS, key: str) -> str:
    """Return why EC2 cannot encrypt volumes with a key, or ''. One AWS call. Raises AWSError, also if there
    is no such key.

    EBS needs an enabled symmetric key (Amazon EBS User Guide, "Requirements for Amazon EBS encryption").
    """
    found = aws.read("kms", "describe_key", _DescribeKey, KeyId=key).key_metadata
    if found.key_state != "Enabled":
        return f"it is {found.key_state}"
    return "" if found.key_spec == "SYMMETRIC_DEFAULT" else f"it is not symmetric ({found.key_spec})"
