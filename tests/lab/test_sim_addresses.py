"""Private addresses, subnets and Elastic IPs."""

from __future__ import annotations

import socket

import pytest
from botocore.config import Config
from support.account import Account, refused
from support.labnode import LabLaptop, inside, shell
from test_sim_interfaces import cards


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


def test_subnet_in_use_cannot_be_deleted(account: Account) -> None:
    vpc = account.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    made = account.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1a")
    subnet = made["Subnet"]["SubnetId"]
    answer = account.ec2.create_network_interface(SubnetId=subnet)
    with refused("DependencyViolation") as refusal:
        account.ec2.delete_subnet(SubnetId=subnet)
    assert refusal.message == f"The subnet '{subnet}' has dependencies and cannot be deleted."
    account.ec2.delete_network_interface(NetworkInterfaceId=answer["NetworkInterface"]["NetworkInterfaceId"])
    account.ec2.delete_subnet(SubnetId=subnet)


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


def test_elastic_ip_with_several_interfaces_needs_an_interface_id(account: Account) -> None:
    (instance,) = account.running(InstanceType="p4d.24xlarge", NetworkInterfaces=cards(4))
    address = account.ec2.allocate_address()["AllocationId"]
    with refused("InvalidInstanceID") as refusal:
        account.ec2.associate_address(AllocationId=address, InstanceId=instance["InstanceId"])
    assert "multiple interfaces" in refusal.message
    primary, *others = [nic["NetworkInterfaceId"] for nic in instance["NetworkInterfaces"]]
    with refused("InvalidParameterValue"):
        account.ec2.associate_address(AllocationId=address, NetworkInterfaceId=others[0])
    account.ec2.associate_address(AllocationId=address, NetworkInterfaceId=primary)
    (listed,) = account.ec2.describe_addresses()["Addresses"]
    assert account.describe(instance["InstanceId"])["PublicIpAddress"] == listed["PublicIp"]
    assert listed["InstanceId"] == instance["InstanceId"]


def test_second_address_replaces_the_first(account: Account) -> None:
    (instance,) = account.running()
    first, second = (account.ec2.allocate_address()["AllocationId"] for _ in range(2))
    for address in (first, second):
        account.ec2.associate_address(AllocationId=address, InstanceId=instance["InstanceId"])
    listed = {a["AllocationId"]: a.get("InstanceId") for a in account.ec2.describe_addresses()["Addresses"]}
    assert listed[second] == instance["InstanceId"]
    assert not listed[first]


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


@pytest.mark.over_http
def test_addresses_by_tag(account: Account) -> None:
    tags = [{"ResourceType": "elastic-ip", "Tags": [{"Key": "of", "Value": "a"}]}]
    address = account.ec2.allocate_address(TagSpecifications=tags)["AllocationId"]
    account.ec2.allocate_address()
    (found,) = account.ec2.describe_addresses(Filters=[{"Name": "tag:of", "Values": ["a"]}])["Addresses"]
    assert found["AllocationId"] == address


def test_lab_node_responds_on_its_elastic_ip(lab_laptop: LabLaptop) -> None:
    (instance,) = lab_laptop.launch()
    before = shell(lab_laptop.login(instance), "hostname")
    address = lab_laptop.ec2.allocate_address()
    lab_laptop.ec2.associate_address(AllocationId=address["AllocationId"], InstanceId=instance["InstanceId"])
    (moved,) = lab_laptop.describe(instance["InstanceId"])
    assert moved["PublicIpAddress"] == address["PublicIp"]
    assert shell(lab_laptop.login(moved), "hostname") == before
    with inside(lab_laptop.sim), pytest.raises(OSError):
        socket.create_connection((instance["PublicIpAddress"], 22), timeout=2)
    lab_laptop.terminate(instance["InstanceId"])
    lab_laptop.ec2.release_address(AllocationId=address["AllocationId"])


def test_public_addresses_are_unique_until_the_pool_is_empty(lab_laptop: LabLaptop) -> None:
    ec2 = lab_laptop.client("ec2", config=Config(retries={"total_max_attempts": 1}))
    (node,) = lab_laptop.launch()
    given: list[dict[str, str]] = []
    try:
        with refused("InsufficientAddressCapacity") as refusal:
            given.extend(ec2.allocate_address() for _ in range(300))  # there are 254
        assert refusal.status == 500
        addresses = {address["PublicIp"] for address in given}
        assert len(addresses) == len(given)
        assert node["PublicIpAddress"] not in addresses
        before = ec2.describe_network_interfaces()["NetworkInterfaces"]
        with refused("InsufficientAddressCapacity"):
            ec2.run_instances(ImageId=lab_laptop.image, InstanceType="g5.xlarge", MinCount=1, MaxCount=1)
        assert ec2.describe_network_interfaces()["NetworkInterfaces"] == before
        ec2.release_address(AllocationId=given[0]["AllocationId"])
        again = ec2.allocate_address()
        assert again["PublicIp"] == given.pop(0)["PublicIp"]
        given.append(again)
    finally:
        for address in given:
            ec2.release_address(AllocationId=address["AllocationId"])
