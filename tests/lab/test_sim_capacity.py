"""Insufficient capacity, quotas, offerings and addresses, with EC2's errors."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.config import Config
from support.account import Account, refused


def test_insufficient_capacity_names_other_zones(
    account: Account,
) -> None:
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 1}, "us-east-1b": {"g5.xlarge": 0}})
    with refused("InsufficientInstanceCapacity") as refusal:
        account.launch(2, Placement={"AvailabilityZone": "us-east-1a"})
    assert refusal.status == 500
    assert "(us-east-1a)" in refusal.message
    assert "us-east-1c" in refusal.message
    assert "us-east-1b" not in refusal.message
    assert account.instances() == []
    account.launch(2, InstanceType="g5.2xlarge", Placement={"AvailabilityZone": "us-east-1a"})


@pytest.mark.over_http
def test_capacity_is_used_and_freed(account: Account) -> None:
    here = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 2}})
    first, _ = account.running(2, **here)
    with refused("InsufficientInstanceCapacity"):
        account.launch(**here)
    account.end(first["InstanceId"])
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 1}}
    account.launch(**here)
    assert len(account.instances()) == 2


def test_client_retries_insufficient_capacity(remote: Account) -> None:
    remote.conditions(capacity={"us-east-1a": {"g5.xlarge": 0}})
    patient = remote.client("ec2", config=Config(retries={"mode": "standard", "total_max_attempts": 4}))
    with refused("InsufficientInstanceCapacity") as refusal:
        patient.run_instances(
            ImageId=remote.image,
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            Placement={"AvailabilityZone": "us-east-1a"},
        )
    assert refusal.retries == 3


def test_request_without_zone_uses_a_zone_with_capacity(account: Account) -> None:
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 1}, "us-east-1b": {"g5.xlarge": 3}})
    instances = account.launch(3)
    assert {instance["Placement"]["AvailabilityZone"] for instance in instances} == {"us-east-1b"}
    account.conditions(
        capacity={f"us-east-1{letter}": {"g5.xlarge": 0} for letter in "abcdef"},
    )
    with refused("InsufficientInstanceCapacity") as refusal:
        account.launch()
    assert "choosing" not in refusal.message


def test_insufficient_spot_capacity(account: Account) -> None:
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 0}})
    with refused("InsufficientInstanceCapacity") as refusal:
        account.launch(
            Placement={"AvailabilityZone": "us-east-1a"}, InstanceMarketOptions={"MarketType": "spot"}
        )
    assert "Spot capacity" in refusal.message


def test_zone_without_the_type_is_unsupported(
    account: Account,
) -> None:
    with refused("Unsupported") as refusal:
        account.launch(InstanceType="p5en.48xlarge", Placement={"AvailabilityZone": "us-east-1b"})
    assert refusal.status == 400
    assert "(us-east-1b)" in refusal.message
    assert refusal.message.endswith("choosing us-east-1a, us-east-1c.")
    (instance,) = account.launch(InstanceType="p5en.48xlarge")
    assert instance["Placement"]["AvailabilityZone"] in ("us-east-1a", "us-east-1c")


@pytest.mark.parametrize(
    ("quota", "instance_type", "limit"),
    [
        ("on-demand-g", "g5.xlarge", 8),
        ("on-demand-p", "p5.48xlarge", 384),
        ("on-demand-standard", "m5.large", 4),
    ],
)
def test_quota_counts_running_vcpus(account: Account, quota: str, instance_type: str, limit: int) -> None:
    account.conditions(quota={quota: limit})
    with refused("VcpuLimitExceeded") as refusal:
        account.launch(3, InstanceType=instance_type)
    assert f"vCPU limit of {limit} " in refusal.message
    first, _ = account.running(2, InstanceType=instance_type)
    with refused("VcpuLimitExceeded"):
        account.launch(InstanceType=instance_type)
    account.end(first["InstanceId"])
    account.launch(InstanceType=instance_type)


def test_other_quotas_do_not_apply(account: Account) -> None:
    account.conditions(quota={"on-demand-p": 0, "on-demand-standard": 0, "spot-g": 0})
    account.launch()
    account.conditions(clear=True, quota={"on-demand-g": 0})
    account.launch(InstanceMarketOptions={"MarketType": "spot"})
    assert len(account.instances()) == 2


@pytest.mark.parametrize(
    ("quota", "instance_type"),
    [("spot-g", "g5.xlarge"), ("spot-p", "p4d.24xlarge"), ("spot-p5", "p5.48xlarge")],
)
def test_spot_quota_error(account: Account, quota: str, instance_type: str) -> None:
    account.conditions(quota={quota: 0})
    with refused("MaxSpotInstanceCountExceeded"):
        account.launch(InstanceType=instance_type, InstanceMarketOptions={"MarketType": "spot"})
    assert account.instances() == []


def test_small_subnet_runs_out_of_addresses(account: Account) -> None:
    vpc = account.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = account.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/28", AvailabilityZone="us-east-1a")[
        "Subnet"
    ]
    assert subnet["AvailableIpAddressCount"] == 11

    def interfaces(count: int) -> list[dict[str, Any]]:
        answers = [account.ec2.create_network_interface(SubnetId=subnet["SubnetId"]) for _ in range(count)]
        return [answer["NetworkInterface"] for answer in answers]

    made = interfaces(9)
    assert len({interface["PrivateIpAddress"] for interface in made}) == 9
    with refused("InsufficientFreeAddressesInSubnet"):
        account.launch(3, SubnetId=subnet["SubnetId"])
    assert account.instances() == []
    made += interfaces(2)
    with refused("InsufficientFreeAddressesInSubnet"):
        interfaces(1)
    addresses = sorted(interface["PrivateIpAddress"] for interface in made)
    for interface in made:
        account.ec2.delete_network_interface(NetworkInterfaceId=interface["NetworkInterfaceId"])
    again = interfaces(11)
    assert sorted(interface["PrivateIpAddress"] for interface in again) == addresses
    for interface in again:
        account.ec2.delete_network_interface(NetworkInterfaceId=interface["NetworkInterfaceId"])
    account.ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    account.ec2.delete_vpc(VpcId=vpc)


def test_free_addresses_condition(account: Account) -> None:
    subnet = account.subnet("us-east-1a")
    account.conditions(free_addresses={subnet: 2})
    (shown,) = account.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    assert shown["AvailableIpAddressCount"] == 2
    with refused("InsufficientFreeAddressesInSubnet"):
        account.launch(3, SubnetId=subnet)
    first, _ = account.running(2, SubnetId=subnet)
    with refused("InsufficientFreeAddressesInSubnet"):
        account.launch(SubnetId=subnet)
    account.end(first["InstanceId"])
    account.launch(SubnetId=subnet)


def test_launch_between_min_and_max_count(account: Account) -> None:
    here = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    assert len(account.launch(MinCount=1, MaxCount=3, **here)) == 3
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 2}})
    assert len(account.launch(MinCount=1, MaxCount=5, **here)) == 2
    account.conditions(clear=True, quota={"on-demand-g": 5 * 4 + 4})
    assert len(account.launch(MinCount=1, MaxCount=5, **here)) == 1
    with refused("VcpuLimitExceeded"):
        account.launch(MinCount=1, MaxCount=5, **here)


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2)])
def test_invalid_counts_are_rejected(account: Account, least: int, most: int) -> None:
    with refused("InvalidParameterValue"):
        account.launch(MinCount=least, MaxCount=most)
    assert account.instances() == []
