"""Elastic IPs: how many the account may have, those of a cluster, and their association with interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Filters
from cloudddp.text import one_line

LIMIT = "AddressLimitExceeded"
_ATTRIBUTE = "vpc-max-elastic-ips"  # EC2 API reference, DescribeAccountAttributes


@dataclass(frozen=True, slots=True)
class ElasticIP:
    """An allocated address, and the interface that has it, or ''."""

    id: str
    interface: str


def listed(aws: AWS, filters: Filters) -> list[ElasticIP]:
    """Return the matching Elastic IPs. One AWS call: DescribeAddresses is not paginated."""
    return [
        ElasticIP(_text(item.get("AllocationId")), _text(item.get("NetworkInterfaceId")))
        for item in aws.call("ec2", "describe_addresses", Filters=filters)["Addresses"]
    ]


def limit(aws: AWS) -> int | None:
    """Return how many Elastic IPs the account may have in the region, or None if AWS does not give the number."""
    answer = aws.call("ec2", "describe_account_attributes", AttributeNames=[_ATTRIBUTE])
    for attribute in answer.get("AccountAttributes", []):
        if attribute.get("AttributeName") == _ATTRIBUTE:
            return _number(attribute.get("AttributeValues", []))
    return None


def associate(aws: AWS, address: ElasticIP, interface: str) -> None:
    """Give an interface the address. Safe to repeat."""
    aws.call("ec2", "associate_address", AllocationId=address.id, NetworkInterfaceId=interface)


def release(aws: AWS, address: ElasticIP) -> None:
    aws.call("ec2", "release_address", AllocationId=address.id)


def _number(values: list[dict[str, Any]]) -> int | None:
    text = str(values[0].get("AttributeValue", "")) if values else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def _text(value: object) -> str:
    return one_line(str(value or ""), 100)
