"""Insufficient capacity, quotas, offerings and addresses, with EC2's errors."""

from __future__ import annotations

import pytest
from support.account import Account, refused


def test_insufficient_capacity_names_other_zones(
    account: Account,
) -> None:
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 1}, "us-east-1b": {"g5.xlarge": 0}})
    here = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    with refused("InsufficientInstanceCapacity") as refusal:
        account.launch(2, **here)
    assert refusal.status == 500
    assert "(us-east-1a)" in refusal.message
    assert "us-east-1c" in refusal.message
    assert "us-east-1b" not in refusal.message
    with refused("InsufficientInstanceCapacity") as refusal:
        account.launch(2, **here, InstanceMarketOptions={"MarketType": "spot"})
    assert "Spot capacity" in refusal.message
    assert account.instances() == []
    account.launch(2, InstanceType="g5.2xlarge", **here)


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


def test_quota_counts_running_vcpus(account: Account) -> None:
    account.conditions(quota={"on-demand-g": 8})
    with refused("VcpuLimitExceeded") as refusal:
        account.launch(3)
    assert "vCPU limit of 8 " in refusal.message
    first, _ = account.running(2)
    with refused("VcpuLimitExceeded"):
        account.launch()
    account.end(first["InstanceId"])
    account.launch()


def test_on_demand_and_spot_have_quotas_of_their_own(account: Account) -> None:
    """Which family has which quota: test_sim_patches.py."""
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    account.conditions(quota={"on-demand-p": 0, "on-demand-standard": 0, "spot-g": 0})
    account.launch()
    with refused("MaxSpotInstanceCountExceeded"):
        account.launch(**spot)
    account.conditions(clear=True, quota={"on-demand-g": 0})
    account.launch(**spot)
    assert len(account.instances()) == 2


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
