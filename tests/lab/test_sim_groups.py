"""The security groups of instances and interfaces."""

from __future__ import annotations

from support.account import Account


def shown(account: Account, instance_id: str) -> list[list[str]]:
    """Return the groups of the instance, and those of each interface."""
    instance = account.describe(instance_id)
    lists = [instance["SecurityGroups"], *(nic["Groups"] for nic in instance["NetworkInterfaces"])]
    return [[group["GroupId"] for group in listed] for listed in lists]


def test_interfaces_have_their_own_groups(account: Account) -> None:
    one, two = (
        account.ec2.create_security_group(GroupName=name, Description="d")["GroupId"]
        for name in ("one", "two")
    )
    (instance,) = account.launch(SecurityGroupIds=[one])
    assert shown(account, instance["InstanceId"]) == [[one], [one]]
    nics = [{"DeviceIndex": 0, "Groups": [one]}, {"DeviceIndex": 1, "Groups": [two]}]
    (instance,) = account.launch(NetworkInterfaces=nics)
    assert shown(account, instance["InstanceId"]) == [[one], [one], [two]]
