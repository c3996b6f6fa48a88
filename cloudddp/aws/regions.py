"""The regions that the account can use."""

from __future__ import annotations

from cloudddp.aws.answers import Id, Record
from cloudddp.aws.client import AWS


class _Region(Record, frozen=True):
    region_name: Id


def enabled(aws: AWS) -> list[str]:
    """Return the regions that are enabled in the account, of the partition of `aws`. One AWS call."""
    return [one.region_name for one in aws.listed("ec2", "describe_regions", "Regions", _Region)]
