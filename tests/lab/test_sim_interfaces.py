"""Network interfaces: several cards, EFA, the limits of a type, and clean-up; their addresses."""

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


# -- private addresses, subnets and Elastic IPs --------------------------------------------------------------


@pytest.mark.parametrize("address", ["garbage", "10.0.0.4; bogus", "203.0.113.9"])
def test_invalid_private_address_is_rejected(account: Account, address: str) -> None:
    """It would be written into rules of the firewall."""
    subnet = account.subnet("us-east-1a")
    listed = [{"PrivateIpAddress": address, "Primary": True}]
    for fields in ({"PrivateIpAddress": address}, {"PrivateIpAddresses": listed}):
        with refused("InvalidParameterValue") as refusal:
            account.launch(NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": subnet, **fields}])
        assert address in refusal.message
        with refused("InvalidParameterValue"):
            account.ec2.create_network_interface(SubnetId=subnet, **fields)
    with refused("InvalidParameterValue"):
        account.launch(SubnetId=subnet, PrivateIpAddress=address)
    assert account.instances() == []
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_elastic_ip_of_an_instance(account: Account) -> None:
    """It replaces the public address, moves unless that is forbidden, and outlives the instance."""
    first, second = account.running(2)
    address = account.ec2.allocate_address(Domain="vpc")
    name, ip = address["AllocationId"], address["PublicIp"]
    made = account.ec2.associate_address(AllocationId=name, InstanceId=first["InstanceId"])
    shown = account.describe(first["InstanceId"])
    assert shown["PublicIpAddress"] == ip != first["PublicIpAddress"]
    assert shown["NetworkInterfaces"][0]["Association"]["PublicIp"] == ip
    (listed,) = account.ec2.describe_addresses(AllocationIds=[name])["Addresses"]
    assert (listed["InstanceId"], listed["AssociationId"]) == (first["InstanceId"], made["AssociationId"])
    assert listed["PrivateIpAddress"] == first["PrivateIpAddress"]
    assert [one["InstanceId"] for one in account.instances(ip_address=ip)] == [first["InstanceId"]]
    with refused("InvalidIPAddress.InUse"):
        account.ec2.release_address(AllocationId=name)
    move = {"AllocationId": name, "InstanceId": second["InstanceId"]}
    with refused("Resource.AlreadyAssociated"):
        account.ec2.associate_address(AllowReassociation=False, **move)
    account.ec2.associate_address(**move)
    assert account.describe(second["InstanceId"])["PublicIpAddress"] == ip
    assert account.describe(first["InstanceId"]).get("PublicIpAddress") != ip
    account.end(second["InstanceId"])
    (left,) = account.ec2.describe_addresses()["Addresses"]
    assert left["AllocationId"] == name
    assert not left.get("InstanceId")
    assert not left.get("AssociationId")
    account.ec2.release_address(AllocationId=name)
    assert account.ec2.describe_addresses()["Addresses"] == []
    with refused("InvalidAllocationID.NotFound"):
        account.ec2.release_address(AllocationId=name)


def test_quota_of_elastic_ips_is_an_account_attribute(account: Account) -> None:
    """EC2 API reference, DescribeAccountAttributes: `vpc-max-elastic-ips`."""

    def limit() -> str:
        names = ["vpc-max-elastic-ips"]
        (found,) = account.ec2.describe_account_attributes(AttributeNames=names)["AccountAttributes"]
        return str(found["AttributeValues"][0]["AttributeValue"])

    assert limit() == "5"
    account.conditions(quota={"addresses": 1})
    assert limit() == "1"
    account.ec2.allocate_address()
    with refused("AddressLimitExceeded") as refusal:
        account.ec2.allocate_address()
    assert refusal.message == "The maximum number of addresses has been reached."
