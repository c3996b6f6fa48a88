"""Placement groups: creation, description, deletion, and launches into them."""

from __future__ import annotations

import pytest
from support.account import Account, refused


@pytest.mark.over_http
def test_placement_groups_are_created_and_listed(account: Account) -> None:
    for name, strategy in (("a", "cluster"), ("b", "spread"), ("c", "partition")):
        account.ec2.create_placement_group(
            GroupName=name,
            Strategy=strategy,
            TagSpecifications=[{"ResourceType": "placement-group", "Tags": [{"Key": "of", "Value": name}]}],
        )

    (shown,) = account.ec2.describe_placement_groups(GroupNames=["a"])["PlacementGroups"]
    assert (shown["GroupName"], shown["Strategy"], shown["State"]) == ("a", "cluster", "available")
    assert shown["GroupId"].startswith("pg-")
    assert shown["GroupArn"].endswith(":placement-group/a")
    assert shown["Tags"] == [{"Key": "of", "Value": "a"}]
    with refused("InvalidPlacementGroup.Duplicate"):
        account.ec2.create_placement_group(GroupName="a")
    with refused("InvalidParameterValue"):
        account.ec2.create_placement_group(GroupName="d", Strategy="pile")

    def found(name: str, value: str) -> list[str]:
        wanted = [{"Name": name, "Values": [value]}]
        groups = account.ec2.describe_placement_groups(Filters=wanted)["PlacementGroups"]
        return [group["GroupName"] for group in groups]

    assert found("tag:of", "a") == ["a"]
    assert found("strategy", "spread") == ["b"]
    assert found("group-name", "c") == ["c"]
    assert found("tag-key", "of") == ["a", "b", "c"]
    assert found("tag:of", "nothing") == []


def test_unknown_placement_group(account: Account) -> None:
    with refused("InvalidPlacementGroup.Unknown"):
        account.ec2.describe_placement_groups(GroupNames=["none"])
    with refused("InvalidPlacementGroup.Unknown"):
        account.ec2.delete_placement_group(GroupName="none")
    with refused("InvalidPlacementGroup.Unknown"):
        account.launch(Placement={"GroupName": "none"})
    assert account.instances() == []


def test_placement_group_in_use_cannot_be_deleted(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    ids = [i["InstanceId"] for i in account.running(2, Placement={"GroupName": "near"})]
    with refused("InvalidPlacementGroup.InUse"):
        account.ec2.delete_placement_group(GroupName="near")
    account.end(*ids)
    account.ec2.delete_placement_group(GroupName="near")
    assert account.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_instance_shows_its_placement_group(account: Account) -> None:
    group = account.ec2.create_placement_group(GroupName="near", Strategy="cluster")["PlacementGroup"]
    (inside,) = account.launch(Placement={"GroupId": group["GroupId"]})
    (outside,) = account.launch()
    assert inside["Placement"]["GroupName"] == "near"
    assert not outside["Placement"].get("GroupName")
    (found,) = account.instances(placement_group_name="near")
    assert found["InstanceId"] == inside["InstanceId"]
    assert found["Placement"]["GroupId"] == group["GroupId"]


def test_cluster_group_rejects_unsupported_types_and_spot_instances_that_stop(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    account.ec2.create_placement_group(GroupName="apart", Strategy="spread")
    with refused("InvalidParameterCombination") as refusal:
        account.launch(InstanceType="t3.micro", Placement={"GroupName": "near"})
    assert "'t3.micro'" in refusal.message
    options = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
    spot = {"MarketType": "spot", "SpotOptions": options}
    with refused("InvalidParameterCombination"):
        account.launch(Placement={"GroupName": "near"}, InstanceMarketOptions=spot)
    account.launch(InstanceType="t3.micro", Placement={"GroupName": "apart"})
    assert len(account.instances()) == 1


def test_cluster_group_spans_one_zone(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    (first,) = account.running(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1a"})
    with refused("InvalidParameterCombination"):
        account.launch(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1b"})
    account.end(first["InstanceId"])
    account.launch(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1b"})


@pytest.mark.over_http
def test_dry_run_has_no_effect(account: Account) -> None:
    with refused("DryRunOperation"):
        account.ec2.create_placement_group(GroupName="near", DryRun=True)
    assert account.ec2.describe_placement_groups()["PlacementGroups"] == []
    account.ec2.create_placement_group(GroupName="near")
    with refused("DryRunOperation"):
        account.ec2.delete_placement_group(GroupName="near", DryRun=True)
    assert len(account.ec2.describe_placement_groups()["PlacementGroups"]) == 1
