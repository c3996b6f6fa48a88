"""Network interfaces: several cards, EFA, the limits of a type, and clean-up."""

from __future__ import annotations

from typing import Any

import pytest
from support.account import Account, refused
from support.harness import until


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


@pytest.mark.over_http
def test_interface_that_outlives_its_instance_keeps_the_group_in_use(account: Account) -> None:
    """EC2 API reference, "DeleteSecurityGroup": a group of a network interface is in use."""
    account.conditions(lingering={"interfaces": 3600})
    group = account.ec2.create_security_group(GroupName="lingering", Description="d")["GroupId"]
    (instance,) = account.running(SecurityGroupIds=[group])
    account.end(instance["InstanceId"])

    def listed() -> list[Any]:
        of_group = [{"Name": "group-id", "Values": [group]}]
        return list(account.ec2.describe_network_interfaces(Filters=of_group)["NetworkInterfaces"])

    (interface,) = listed()
    assert interface["Status"] == "in-use"
    assert interface["Attachment"]["InstanceId"] == instance["InstanceId"]
    with refused("DependencyViolation") as refusal:
        account.ec2.delete_security_group(GroupId=group)
    assert refusal.message == f"resource {group} has a dependent object"
    with refused("InvalidParameterValue"):
        account.ec2.delete_network_interface(NetworkInterfaceId=interface["NetworkInterfaceId"])
    account.conditions(lingering={"interfaces": 0.1})
    until(lambda: listed() == [])
    account.ec2.delete_security_group(GroupId=group)


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
        ("g5.12xlarge", [{"DeviceIndex": 0, **EFA}, {"DeviceIndex": 1, **EFA}], "AttachmentLimitExceeded"),
        ("p5.48xlarge", [{"DeviceIndex": index} for index in range(3)], "AttachmentLimitExceeded"),
        ("p6-b300.48xlarge", [{"DeviceIndex": 0, **EFA}], "UnsupportedOperation"),
        ("g5.12xlarge", [{"DeviceIndex": 0, "InterfaceType": "efa-only"}], "InvalidParameterCombination"),
        ("g5.12xlarge", [{"DeviceIndex": 0}, {"DeviceIndex": 0}], "InvalidParameterValue"),
        ("g5.12xlarge", [{"DeviceIndex": 1}], "InvalidParameterValue"),
        ("g5.12xlarge", [{"DeviceIndex": 0, "InterfaceType": "wire"}], "InvalidParameterValue"),
    ],
)
def test_interfaces_beyond_the_type_limits_are_rejected(
    account: Account, instance_type: str, nics: list[dict[str, Any]], code: str
) -> None:
    with refused(code):
        account.launch(InstanceType=instance_type, NetworkInterfaces=nics)
    assert account.instances() == []
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_existing_interface_survives_the_instance(account: Account) -> None:
    made = account.ec2.create_network_interface(SubnetId=account.subnet("us-east-1a"))["NetworkInterface"]
    interface = made["NetworkInterfaceId"]
    nics = [{"DeviceIndex": 0, "NetworkInterfaceId": interface}]
    (instance,) = account.running(NetworkInterfaces=nics)
    assert instance["PrivateIpAddress"] == made["PrivateIpAddress"]
    with refused("InvalidParameterValue") as refusal:
        account.ec2.delete_network_interface(NetworkInterfaceId=interface)
    assert "currently in use" in refusal.message
    with refused("InvalidNetworkInterface.InUse"):
        account.launch(NetworkInterfaces=nics)
    account.end(instance["InstanceId"])
    (left,) = account.ec2.describe_network_interfaces()["NetworkInterfaces"]
    assert (left["NetworkInterfaceId"], left["Status"]) == (interface, "available")
    account.ec2.delete_network_interface(NetworkInterfaceId=interface)


def test_address_in_use_is_rejected(account: Account) -> None:
    (instance,) = account.launch(SubnetId=account.subnet("us-east-1a"))
    taken = {"SubnetId": instance["SubnetId"], "PrivateIpAddress": instance["PrivateIpAddress"]}
    with refused("InvalidIPAddress.InUse"):
        account.launch(**taken)
    account.end(instance["InstanceId"])
    (again,) = account.launch(**taken)
    assert again["PrivateIpAddress"] == instance["PrivateIpAddress"]


def test_connection_tracking_timeout_is_stored(account: Account) -> None:
    tracking = {"TcpEstablishedTimeout": 86400}
    request = [{"DeviceIndex": 0, "ConnectionTrackingSpecification": tracking}]
    (instance,) = account.running(InstanceType="g7.2xlarge", NetworkInterfaces=request)
    (shown,) = instance["NetworkInterfaces"]
    assert shown["ConnectionTrackingConfiguration"] == tracking
    (listed,) = account.ec2.describe_network_interfaces()["NetworkInterfaces"]
    assert listed["ConnectionTrackingConfiguration"] == tracking
    for timeout in (59, 432_001):
        request[0]["ConnectionTrackingSpecification"] = {"TcpEstablishedTimeout": timeout}
        with refused("InvalidParameterValue"):
            account.launch(InstanceType="g7.2xlarge", NetworkInterfaces=request)


def test_types_differ_in_their_default_timeout(account: Account) -> None:
    """350 seconds on Nitro v6, 5 days elsewhere (EC2's model: ConnectionTrackingSpecificationRequest)."""
    for instance_type, seconds in (("p6-b200.48xlarge", 350), ("p5.48xlarge", 432_000)):
        (described,) = account.ec2.describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
        defaults = described["NetworkInfo"]["ConnectionTrackingConfiguration"]
        assert defaults["DefaultTcpEstablishedTimeout"] == seconds
