"""Network interfaces: several cards, EFA, the limits of a type, and clean-up."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account, refused


def cards(count: int, kind: str = "efa-only") -> list[dict[str, Any]]:
    """AWS's layout: an ordinary interface on card 0, and one on each further card."""
    first = {"DeviceIndex": 0, "NetworkCardIndex": 0, "InterfaceType": "interface"}
    more = [{"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": kind} for card in range(1, count)]
    return [first, {"DeviceIndex": 1, "NetworkCardIndex": 0, "InterfaceType": kind}, *more]


def layout(instance: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (nic["Attachment"]["NetworkCardIndex"], nic["Attachment"]["DeviceIndex"], nic["InterfaceType"])
        for nic in instance["NetworkInterfaces"]
    ]


@pytest.mark.over_http
def test_interfaces_have_cards_and_end_with_the_instance(account: Account) -> None:
    request = cards(4)
    (instance,) = account.running(InstanceType="p4d.24xlarge", NetworkInterfaces=request)
    wanted = [(nic["NetworkCardIndex"], nic["DeviceIndex"], nic["InterfaceType"]) for nic in request]
    assert layout(instance) == wanted
    listed = account.ec2.describe_network_interfaces()["NetworkInterfaces"]
    assert sorted(layout({"NetworkInterfaces": listed})) == sorted(wanted)
    efa = [{"Name": "interface-type", "Values": ["efa-only"]}]
    assert len(account.ec2.describe_network_interfaces(Filters=efa)["NetworkInterfaces"]) == 4
    account.end(instance["InstanceId"])
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []
    assert account.describe(instance["InstanceId"]).get("NetworkInterfaces", []) == []


def test_efa_only_interfaces_have_no_address(account: Account) -> None:
    subnet = account.subnet("us-east-1a")
    before = account.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailableIpAddressCount"]
    request = [{**nic, "SubnetId": subnet} for nic in cards(32)]
    (instance,) = account.launch(InstanceType="p5.48xlarge", NetworkInterfaces=request)
    primary, *others = instance["NetworkInterfaces"]
    assert primary["PrivateIpAddress"] == instance["PrivateIpAddress"]
    assert len(others) == 32
    assert {nic.get("PrivateIpAddress") for nic in others} == {None}
    assert all(nic.get("PrivateIpAddresses", []) == [] for nic in others)
    after = account.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailableIpAddressCount"]
    assert before - after == 1


def test_instance_with_several_interfaces_has_no_public_address(account: Account) -> None:
    (single,) = account.launch(NetworkInterfaces=[{"DeviceIndex": 0}])
    (several,) = account.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=cards(4))
    assert account.describe(single["InstanceId"]).get("PublicIpAddress")
    assert not account.describe(several["InstanceId"]).get("PublicIpAddress")
    asking = cards(4)
    asking[0]["AssociatePublicIpAddress"] = True
    with refused("InvalidParameterCombination") as refusal:
        account.launch(InstanceType="p4d.24xlarge", NetworkInterfaces=asking)
    assert "associatePublicIPAddress" in refusal.message


EFA = {"InterfaceType": "efa"}


@pytest.mark.parametrize(
    ("instance_type", "nics", "code"),
    [
        ("g5.xlarge", [{"DeviceIndex": 0, "NetworkCardIndex": 1}], "InvalidParameterValue"),
        ("g5.xlarge", [{"DeviceIndex": 0, **EFA}], "UnsupportedOperation"),
        ("g5.xlarge", [{"DeviceIndex": index} for index in range(5)], "AttachmentLimitExceeded"),
        ("p5.48xlarge", [{"DeviceIndex": index} for index in range(3)], "AttachmentLimitExceeded"),
        ("g5.12xlarge", [{"DeviceIndex": 0, "InterfaceType": "efa-only"}], "InvalidParameterCombination"),
        ("g5.12xlarge", [{"DeviceIndex": 1}], "InvalidParameterValue"),
    ],
)
def test_interfaces_beyond_the_type_limits_are_rejected(
    account: Account, instance_type: str, nics: list[dict[str, Any]], code: str
) -> None:
    with refused(code):
        account.launch(InstanceType=instance_type, NetworkInterfaces=nics)
    assert account.instances() == []
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []
