"""The exact requests of `up`, for six instance types in six accounts, are those in tests/golden.

A change shows as a diff, a call on each line. After one that is wanted:
UPDATE_GOLDEN=1 python -m pytest tests/unit/test_golden_requests.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import golden

from cloudddp.config.spec import ClusterSpec

ZONES = ("us-east-1c", "us-east-1a")


def custom_vpc(aws: Any) -> dict[str, Any]:
    """A VPC with public subnets, found by tags."""
    ec2 = aws.client("ec2")
    vpc = _vpc(ec2, Name="training")
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    main = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "association.main", "Values": ["true"]}]
    (table,) = ec2.describe_route_tables(Filters=main)["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    return {"vpc": "tag:Name=training", "subnets": ("tag:Use=nodes",)}


def private_subnets(aws: Any) -> dict[str, Any]:
    """A VPC without an internet gateway, reached by Session Manager."""
    vpc = _vpc(aws.client("ec2"))
    command = (
        "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters portNumber=%p"
    )
    return {"vpc": vpc, "proxy_command": command, "instance_profile": "nodes"}


def _vpc(ec2: Any, **tags: str) -> str:
    vpc = str(ec2.create_vpc(CidrBlock="10.20.0.0/16")["Vpc"]["VpcId"])
    if tags:
        ec2.create_tags(Resources=[vpc], Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
    for number, zone in enumerate(ZONES):
        use = [{"ResourceType": "subnet", "Tags": [{"Key": "Use", "Value": "nodes"}]}]
        ec2.create_subnet(
            VpcId=vpc, CidrBlock=f"10.20.{number}.0/24", AvailabilityZone=zone, TagSpecifications=use
        )
    return vpc


def organization(_: Any) -> dict[str, Any]:
    """An account whose organization requires tags and a key of its own."""
    return {
        "tags": {"CostCenter": "4711", "Team": "vision"},
        "kms_key": "alias/training",
        "instance_profile": "nodes",
        "imds_hop_limit": 2,
    }


def reserved(aws: Any, instance_type: str) -> dict[str, Any]:
    """An on-demand capacity reservation of exactly these nodes."""
    offered = aws.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )["InstanceTypeOfferings"]
    answer = aws.client("ec2").create_capacity_reservation(
        InstanceType=instance_type,
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=min(one["Location"] for one in offered),
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    return {"reservation": answer["CapacityReservation"]["CapacityReservationId"]}


ACCOUNTS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "default": lambda *_: {},
    "custom-vpc": lambda aws, _: custom_vpc(aws),
    "private": lambda aws, _: private_subnets(aws),
    "organization": lambda aws, _: organization(aws),
    "spot": lambda *_: {"spot": True},
    "reservation": reserved,
}


@pytest.mark.parametrize("instance_type", golden.TYPES)
@pytest.mark.parametrize("account", ACCOUNTS)
def test_requests_are_those_of_the_golden_file(
    account: str, instance_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path))
    spec = ClusterSpec(name="golden", instance_type=instance_type)
    found = golden.requests(spec, lambda aws: ACCOUNTS[account](aws, instance_type))
    assert [text for call in found if (text := golden.invalid(call))] == []
    path = golden.FOLDER / account / f"{instance_type}.jsonl"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write(path, found)
    assert found == golden.read(path)


def test_no_golden_file_is_left_over() -> None:
    expected = {f"{account}/{name}.jsonl" for account in ACCOUNTS for name in golden.TYPES}
    files = (path for path in golden.FOLDER.rglob("*") if path.is_file())
    assert {str(path.relative_to(golden.FOLDER)) for path in files} == expected


def test_invalid_request_is_reported() -> None:
    assert "Unknown parameter" in golden.invalid({"call": "ec2 RunInstances", "params": {"ImageID": "ami-0"}})
