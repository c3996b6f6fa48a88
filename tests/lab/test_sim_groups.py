"""Changing the security groups of instances and interfaces."""

from __future__ import annotations

from support.account import Account, refused


def shown(account: Account, instance_id: str) -> list[list[str]]:
    """Return the groups of the instance, and those of each interface."""
    instance = account.describe(instance_id)
    lists = [instance["SecurityGroups"], *(nic["Groups"] for nic in instance["NetworkInterfaces"])]
    return [[group["GroupId"] for group in listed] for listed in lists]


def test_groups_of_an_instance_and_its_interfaces_change_together(account: Account) -> None:
    one, two = (
        account.ec2.create_security_group(GroupName=name, Description="d")["GroupId"]
        for name in ("one", "two")
    )
    (instance,) = account.launch(SecurityGroupIds=[one])
    name = instance["InstanceId"]
    assert shown(account, name) == [[one], [one]]
    account.ec2.modify_instance_attribute(InstanceId=name, Groups=[two])
    assert shown(account, name) == [[two], [two]]
    assert [found["InstanceId"] for found in account.instances(instance__group_id=two)] == [name]
    with refused("InvalidGroup.NotFound"):
        account.ec2.modify_instance_attribute(InstanceId=name, Groups=["sg-0123456789abcdef0"])
    interface = instance["NetworkInterfaces"][0]["NetworkInterfaceId"]
    account.ec2.modify_network_interface_attribute(NetworkInterfaceId=interface, Groups=[one])
    assert shown(account, name) == [[one], [one]]


def test_interfaces_have_their_own_groups(account: Account) -> None:
    one, two = (
        account.ec2.create_security_group(GroupName=name, Description="d")["GroupId"]
        for name in ("one", "two")
    )
    nics = [{"DeviceIndex": 0, "Groups": [one]}, {"DeviceIndex": 1, "Groups": [two]}]
    (instance,) = account.launch(NetworkInterfaces=nics)
    assert shown(account, instance["InstanceId"]) == [[one], [one], [two]]
    with refused("InvalidInstanceID"):
        account.ec2.modify_instance_attribute(InstanceId=instance["InstanceId"], Groups=[two])
