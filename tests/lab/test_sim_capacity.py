"""Insufficient capacity, quotas, offerings and addresses, with EC2's errors; which family has which quota."""

from __future__ import annotations

import pytest
from support.account import Account, refused

from cloudddp.simulator.ec2 import catalog
from cloudddp.simulator.ec2.patch import add, wrap


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


# -- look-ups of instance types; patching of moto, which fails if moto is not as expected --------------------


class Theirs:
    def known(self) -> str:
        return "theirs"


def test_missing_method_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"Theirs\.gone.*moto 5\.2"):
        wrap(Theirs, "gone", lambda original: original)


def test_new_method_of_moto_is_not_overwritten() -> None:
    with pytest.raises(RuntimeError, match=r"Theirs\.known"):
        add(Theirs, known=lambda _: "ours")
    assert Theirs().known() == "theirs"


@pytest.mark.parametrize(
    ("instance_type", "on_demand", "spot"),
    [
        ("g4dn.xlarge", "on-demand-g", "spot-g"),
        ("gr6.4xlarge", "on-demand-g", "spot-g"),
        ("vt1.3xlarge", "on-demand-g", "spot-g"),
        ("p4d.24xlarge", "on-demand-p", "spot-p"),
        ("p5en.48xlarge", "on-demand-p", "spot-p5"),
        ("p6-b200.48xlarge", "on-demand-p", "spot-p5"),
        ("m5.large", "on-demand-standard", "spot-standard"),
        ("trn1.2xlarge", "on-demand-other", "spot-other"),
    ],
)
def test_quota_by_family(instance_type: str, on_demand: str, spot: str) -> None:
    assert catalog.quota(instance_type, spot=False) == on_demand
    assert catalog.quota(instance_type, spot=True) == spot
