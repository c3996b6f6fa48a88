"""Placement groups: made, described, deleted, and what a launch into one must be like."""

from __future__ import annotations

import pytest
from account import Account, refused


def test_a_placement_group_is_shown_as_it_was_made(account: Account) -> None:
    tags = [{"Key": "cloudddp:cluster", "Value": "a"}]
    made = account.ec2.create_placement_group(
        GroupName="near",
        Strategy="cluster",
        TagSpecifications=[{"ResourceType": "placement-group", "Tags": tags}],
    )["PlacementGroup"]
    (shown,) = account.ec2.describe_placement_groups(GroupNames=["near"])["PlacementGroups"]
    assert shown == made
    assert (shown["GroupName"], shown["Strategy"], shown["State"]) == ("near", "cluster", "available")
    assert shown["GroupId"].startswith("pg-")
    assert shown["GroupArn"].endswith(":placement-group/near")
    assert shown["Tags"] == tags


def test_placement_groups_are_found_by_tag_strategy_and_name(account: Account) -> None:
    for name, strategy in (("a", "cluster"), ("b", "spread"), ("c", "partition")):
        account.ec2.create_placement_group(
            GroupName=name,
            Strategy=strategy,
            TagSpecifications=[{"ResourceType": "placement-group", "Tags": [{"Key": "of", "Value": name}]}],
        )

    def found(name: str, value: str) -> list[str]:
        wanted = [{"Name": name, "Values": [value]}]
        groups = account.ec2.describe_placement_groups(Filters=wanted)["PlacementGroups"]
        return [group["GroupName"] for group in groups]

    assert found("tag:of", "a") == ["a"]
    assert found("strategy", "spread") == ["b"]
    assert found("group-name", "c") == ["c"]
    assert found("tag-key", "of") == ["a", "b", "c"]
    assert found("tag:of", "nothing") == []


def test_a_second_group_of_the_same_name_is_refused(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near")
    with refused("InvalidPlacementGroup.Duplicate"):
        account.ec2.create_placement_group(GroupName="near")


def test_an_unknown_group_is_unknown_everywhere(account: Account) -> None:
    with refused("InvalidPlacementGroup.Unknown"):
        account.ec2.describe_placement_groups(GroupNames=["none"])
    with refused("InvalidPlacementGroup.Unknown"):
        account.ec2.delete_placement_group(GroupName="none")
    with refused("InvalidPlacementGroup.Unknown"):
        account.launch(Placement={"GroupName": "none"})
    assert account.instances() == []


def test_a_group_in_use_cannot_be_deleted_until_its_instances_are_terminated(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    ids = [i["InstanceId"] for i in account.running(2, Placement={"GroupName": "near"})]
    with refused("InvalidPlacementGroup.InUse"):
        account.ec2.delete_placement_group(GroupName="near")
    account.end(*ids)
    account.ec2.delete_placement_group(GroupName="near")
    assert account.ec2.describe_placement_groups()["PlacementGroups"] == []


def test_an_instance_tells_its_placement_group_and_is_found_by_it(account: Account) -> None:
    group = account.ec2.create_placement_group(GroupName="near", Strategy="cluster")["PlacementGroup"]
    (inside,) = account.launch(Placement={"GroupId": group["GroupId"]})
    (outside,) = account.launch()
    assert inside["Placement"]["GroupName"] == "near"
    assert not outside["Placement"].get("GroupName")
    (found,) = account.instances(placement_group_name="near")
    assert found["InstanceId"] == inside["InstanceId"]
    assert found["Placement"]["GroupId"] == group["GroupId"]


def test_a_cluster_group_takes_no_type_without_support_for_it(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    account.ec2.create_placement_group(GroupName="apart", Strategy="spread")
    with refused("InvalidParameterCombination") as said:
        account.launch(InstanceType="t3.micro", Placement={"GroupName": "near"})
    assert "'t3.micro'" in said.message
    account.launch(InstanceType="t3.micro", Placement={"GroupName": "apart"})
    assert len(account.instances()) == 1


def test_a_cluster_group_spans_one_zone(account: Account) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    (first,) = account.running(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1a"})
    with refused("InvalidParameterCombination"):
        account.launch(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1b"})
    account.end(first["InstanceId"])
    account.launch(Placement={"GroupName": "near", "AvailabilityZone": "us-east-1b"})


@pytest.mark.parametrize("behaviour", ["stop", "hibernate"])
def test_a_cluster_group_takes_no_spot_instance_that_may_come_back(account: Account, behaviour: str) -> None:
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    options = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": behaviour}
    with refused("InvalidParameterCombination"):
        account.launch(
            Placement={"GroupName": "near"},
            InstanceMarketOptions={"MarketType": "spot", "SpotOptions": options},
        )


def test_a_dry_run_makes_and_deletes_no_group(account: Account) -> None:
    with refused("DryRunOperation"):
        account.ec2.create_placement_group(GroupName="near", DryRun=True)
    assert account.ec2.describe_placement_groups()["PlacementGroups"] == []
    account.ec2.create_placement_group(GroupName="near")
    with refused("DryRunOperation"):
        account.ec2.delete_placement_group(GroupName="near", DryRun=True)
    assert len(account.ec2.describe_placement_groups()["PlacementGroups"]) == 1


def test_a_strategy_that_is_none_is_refused(account: Account) -> None:
    with refused("InvalidParameterValue"):
        account.ec2.create_placement_group(GroupName="near", Strategy="pile")
