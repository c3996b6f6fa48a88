"""Spot requests of instances."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account

SPOT = {
    "MarketType": "spot",
    "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
}


def requests(account: Account, **more: Any) -> list[dict[str, Any]]:
    return account.ec2.describe_spot_instance_requests(**more)["SpotInstanceRequests"]


def spot(account: Account, count: int = 1) -> list[dict[str, Any]]:
    tags = [
        {"ResourceType": kind, "Tags": [{"Key": "of", "Value": "a"}]}
        for kind in ("instance", "spot-instances-request")
    ]
    return account.running(count, InstanceMarketOptions=SPOT, TagSpecifications=tags)


@pytest.mark.over_http
def test_spot_instances_have_requests(account: Account) -> None:
    (on_demand,) = account.launch()
    assert "SpotInstanceRequestId" not in on_demand
    assert "InstanceLifecycle" not in on_demand
    instances = spot(account, 2)
    assert len(account.instances(instance_lifecycle="spot")) == 2
    assert {instance["InstanceLifecycle"] for instance in instances} == {"spot"}
    for instance in instances:
        (made,) = requests(account, SpotInstanceRequestIds=[instance["SpotInstanceRequestId"]])
        assert made["InstanceId"] == instance["InstanceId"]
        assert (made["State"], made["Status"]["Code"], made["Type"]) == ("active", "fulfilled", "one-time")
        assert made["InstanceInterruptionBehavior"] == "terminate"
        assert made["Tags"] == [{"Key": "of", "Value": "a"}]
        assert made["CreateTime"].year >= 2026
    ids = [instance["SpotInstanceRequestId"] for instance in instances]
    assert len(set(ids)) == 2
    of_tag = [{"Name": "tag:of", "Values": ["a"]}]
    assert {made["SpotInstanceRequestId"] for made in requests(account, Filters=of_tag)} == set(ids)


def test_termination_closes_the_request(account: Account) -> None:
    (instance,) = spot(account)
    account.end(instance["InstanceId"])
    (made,) = requests(account, SpotInstanceRequestIds=[instance["SpotInstanceRequestId"]])
    assert (made["State"], made["Status"]["Code"]) == ("closed", "instance-terminated-by-user")
