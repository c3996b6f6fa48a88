"""Elastic IPs: how many the account may have, those of a cluster, and their association with interfaces."""

from __future__ import annotations

from msgspec import field

from cloudddp.aws.answers import Answer, Id
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Filters

LIMIT = "AddressLimitExceeded"
_ATTRIBUTE = "vpc-max-elastic-ips"  # EC2 API reference, DescribeAccountAttributes


class ElasticIP(Answer, frozen=True):
    """An allocated address, and the interface that has it, or ''."""

    id: Id = field(name="AllocationId")
    interface: str = field(name="NetworkInterfaceId", default="")


class _Value(Answer, frozen=True):
    attribute_value: str = ""


class _Attribute(Answer, frozen=True):
    attribute_name: str = ""
    attribute_values: tuple[_Value, ...] = ()


def listed(aws: AWS, filters: Filters) -> list[ElasticIP]:
    """Return the matching Elastic IPs. One AWS call: DescribeAddresses is not paginated."""
    return aws.listed("describe_addresses", ElasticIP, Filters=filters)


def limit(aws: AWS) -> int | None:
    """Return how many Elastic IPs the account may have in the region, or None if AWS does not give the
    number."""
    attributes = aws.listed("describe_account_attributes", _Attribute, AttributeNames=[_ATTRIBUTE])
    for attribute in attributes:
        text = attribute.attribute_values[0].attribute_value if attribute.attribute_values else ""
        if attribute.attribute_name == _ATTRIBUTE and text.isascii() and text.isdigit() and len(text) < 7:
            return int(text)
    return None


def associate(aws: AWS, address: ElasticIP, interface: str) -> None:
    """Give an interface the address. Safe to repeat."""
    aws.call("ec2", "associate_address", AllocationId=address.id, NetworkInterfaceId=interface)


def release(aws: AWS, address: ElasticIP) -> None:
    aws.call("ec2", "release_address", AllocationId=address.id)
