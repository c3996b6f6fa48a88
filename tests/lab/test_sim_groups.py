"""Changing the security groups of instances and interfaces."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account, refused
from test_sim_interfaces import cards


@pytest.fixture
def groups(account: Account) -> Any:
    """Two groups, deleted after the instances of the test."""
    made = [
        account.ec2.create_security_group(GroupName=name, Description="d")["GroupId"]
        for name in ("one", "two")
    ]
    yield made
    if ids := [instance["InstanceId"] for instance in account.instances()]:
        account.end(*ids)
    for group in made:
        account.ec2.delete_security_group(GroupId=group)


def shown(account: Account, instance_id: str) -> list[list[str]]:
    """Return the groups of the instance, and those of each interface."""
    instance = account.describe(instance_id)
    lists = [instance["SecurityGroups"], *(nic["Groups"] for nic in instance["NetworkInterfaces"])]
    return [[group["GroupId"] for group in listed] for listed in lists]


def test_changing_groups_of_an_instance_changes_its_interface(account: Account, groups: list[str]) -> None:
    one, two = groups
    (instance,) = account.launch(SecurityGroupIds=[one])
    assert shown(account, instance["InstanceId"]) == [[one], [one]]
    account.ec2.modify_instance_attribute(InstanceId=instance["InstanceId"], Groups=[two])
    assert shown(account, instance["InstanceId"]) == [[two], [two]]
    (found,) = account.instances(instance__group_id=two)
    assert found["InstanceId"] == instance["InstanceId"]
    account.ec2.delete_security_group(GroupId=one)
    groups.remove(one)


def test_changing_groups_of_the_primary_interface_changes_the_instance(
    account: Account, groups: list[str]
) -> None:
    one, two = groups
    (instance,) = account.launch(NetworkInterfaces=[{"DeviceIndex": 0, "Groups": [one]}])
    interface = instance["NetworkInterfaces"][0]["NetworkInterfaceId"]
    account.ec2.modify_network_interface_attribute(NetworkInterfaceId=interface, Groups=[two])
    assert shown(account, instance["InstanceId"]) == [[two], [two]]


def test_interfaces_have_their_own_groups(account: Account, groups: list[str]) -> None:
    one, two = groups
    nics = [{"DeviceIndex": 0, "Groups": [one]}, {"DeviceIndex": 1, "Groups": [two]}]
    (instance,) = account.launch(NetworkInterfaces=nics)
    assert shown(account, instance["InstanceId"]) == [[one], [one], [two]]


def test_groups_with_several_interfaces_need_an_interface_id(account: Account) -> None:
    (instance,) = account.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=cards(4))
    group = instance["SecurityGroups"][0]["GroupId"]
    with refused("InvalidInstanceID"):
        account.ec2.modify_instance_attribute(InstanceId=instance["InstanceId"], Groups=[group])


def test_unknown_group_changes_nothing(account: Account, groups: list[str]) -> None:
    one, _ = groups
    (instance,) = account.launch(SecurityGroupIds=[one])
    with refused("InvalidGroup.NotFound"):
        account.ec2.modify_instance_attribute(
            InstanceId=instance["InstanceId"], Groups=["sg-0123456789abcdef0"]
        )
    assert shown(account, instance["InstanceId"]) == [[one], [one]]


def test_delete_returns_the_group_id(account: Account) -> None:
    for by in ("GroupId", "GroupName"):
        group = account.ec2.create_security_group(GroupName="gone", Description="d")["GroupId"]
        answer = account.ec2.delete_security_group(**{by: group if by == "GroupId" else "gone"})
        assert (answer["Return"], answer["GroupId"]) == (True, group)
