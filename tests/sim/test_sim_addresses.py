"""Elastic IPs: allocated, given to an instance in place of its public address, taken back, released."""

from __future__ import annotations

import socket

import pytest
from account import Account, refused
from botocore.config import Config
from lab import LabLaptop, inside, shell
from test_sim_interfaces import cards


@pytest.mark.parametrize("address", ["garbage", "10.0.0.4; bogus", "2001:db8::1", "10.0.0.0/8"])
def test_a_private_address_that_is_none_is_refused(account: Account, address: str) -> None:
    subnet = account.subnet("us-east-1a")
    listed = [{"PrivateIpAddress": address, "Primary": True}]
    for wish in ({"PrivateIpAddress": address}, {"PrivateIpAddresses": listed}):
        with refused("InvalidParameterValue") as said:
            account.launch(NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": subnet, **wish}])
        assert address in said.message
        with refused("InvalidParameterValue"):
            account.ec2.create_network_interface(SubnetId=subnet, **wish)
    with refused("InvalidParameterValue"):
        account.launch(SubnetId=subnet, PrivateIpAddress=address)
    assert account.instances() == []
    assert account.ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_a_subnet_stays_while_something_has_an_interface_in_it(account: Account) -> None:
    vpc = account.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    made = account.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1a")
    subnet = made["Subnet"]["SubnetId"]
    answer = account.ec2.create_network_interface(SubnetId=subnet)
    with refused("DependencyViolation") as said:
        account.ec2.delete_subnet(SubnetId=subnet)
    assert said.message == f"The subnet '{subnet}' has dependencies and cannot be deleted."
    account.ec2.delete_network_interface(NetworkInterfaceId=answer["NetworkInterface"]["NetworkInterfaceId"])
    account.ec2.delete_subnet(SubnetId=subnet)
    account.ec2.delete_vpc(VpcId=vpc)


def test_an_instance_keeps_its_subnet_until_it_is_terminated(account: Account) -> None:
    subnet = account.subnet("us-east-1f")
    (instance,) = account.launch(InstanceType="m5.large", SubnetId=subnet)
    with refused("DependencyViolation"):
        account.ec2.delete_subnet(SubnetId=subnet)
    account.end(instance["InstanceId"])
    account.ec2.delete_subnet(SubnetId=subnet)
    account.ec2.create_default_subnet(AvailabilityZone="us-east-1f")


def test_an_elastic_ip_takes_the_place_of_the_public_address(account: Account) -> None:
    (instance,) = account.running()
    before = instance["PublicIpAddress"]
    address = account.ec2.allocate_address(Domain="vpc")
    made = account.ec2.associate_address(
        AllocationId=address["AllocationId"], InstanceId=instance["InstanceId"]
    )
    shown = account.describe(instance["InstanceId"])
    assert shown["PublicIpAddress"] == address["PublicIp"] != before
    assert shown["NetworkInterfaces"][0]["Association"]["PublicIp"] == address["PublicIp"]
    (listed,) = account.ec2.describe_addresses(AllocationIds=[address["AllocationId"]])["Addresses"]
    assert listed["InstanceId"] == instance["InstanceId"]
    assert listed["PrivateIpAddress"] == instance["PrivateIpAddress"]
    assert listed["AssociationId"] == made["AssociationId"]
    (found,) = account.instances(ip_address=address["PublicIp"])
    assert found["InstanceId"] == instance["InstanceId"]
    account.ec2.disassociate_address(AssociationId=made["AssociationId"])
    after = account.describe(instance["InstanceId"]).get("PublicIpAddress")
    assert after != address["PublicIp"]
    (listed,) = account.ec2.describe_addresses()["Addresses"]
    assert not listed.get("InstanceId")


def test_an_instance_with_several_interfaces_gets_its_address_through_an_interface(account: Account) -> None:
    (instance,) = account.running(InstanceType="p4d.24xlarge", NetworkInterfaces=cards(4))
    address = account.ec2.allocate_address()["AllocationId"]
    with refused("InvalidInstanceID") as said:
        account.ec2.associate_address(AllocationId=address, InstanceId=instance["InstanceId"])
    assert "multiple interfaces" in said.message
    primary, *others = [nic["NetworkInterfaceId"] for nic in instance["NetworkInterfaces"]]
    with refused("InvalidParameterValue"):
        account.ec2.associate_address(AllocationId=address, NetworkInterfaceId=others[0])
    account.ec2.associate_address(AllocationId=address, NetworkInterfaceId=primary)
    (listed,) = account.ec2.describe_addresses()["Addresses"]
    assert account.describe(instance["InstanceId"])["PublicIpAddress"] == listed["PublicIp"]
    assert listed["InstanceId"] == instance["InstanceId"]


def test_an_address_in_use_is_released_only_after_it_was_taken_back(account: Account) -> None:
    (instance,) = account.running()
    address = account.ec2.allocate_address()["AllocationId"]
    association = account.ec2.associate_address(AllocationId=address, InstanceId=instance["InstanceId"])
    with refused("InvalidIPAddress.InUse"):
        account.ec2.release_address(AllocationId=address)
    account.ec2.disassociate_address(AssociationId=association["AssociationId"])
    account.ec2.release_address(AllocationId=address)
    assert account.ec2.describe_addresses()["Addresses"] == []
    with refused("InvalidAllocationID.NotFound"):
        account.ec2.release_address(AllocationId=address)


def test_an_address_outlives_its_instance_and_goes_on_billing(account: Account) -> None:
    (instance,) = account.running()
    address = account.ec2.allocate_address()["AllocationId"]
    account.ec2.associate_address(AllocationId=address, InstanceId=instance["InstanceId"])
    account.end(instance["InstanceId"])
    (left,) = account.ec2.describe_addresses()["Addresses"]
    assert left["AllocationId"] == address
    assert not left.get("InstanceId")
    assert not left.get("AssociationId")


def test_an_address_moves_unless_the_request_forbids_it(account: Account) -> None:
    first, second = account.running(2)
    address = account.ec2.allocate_address()
    request = {"AllocationId": address["AllocationId"]}
    account.ec2.associate_address(InstanceId=first["InstanceId"], **request)
    with refused("Resource.AlreadyAssociated"):
        account.ec2.associate_address(InstanceId=second["InstanceId"], AllowReassociation=False, **request)
    account.ec2.associate_address(InstanceId=second["InstanceId"], **request)
    assert account.describe(second["InstanceId"])["PublicIpAddress"] == address["PublicIp"]
    assert account.describe(first["InstanceId"]).get("PublicIpAddress") != address["PublicIp"]


def test_a_second_address_replaces_the_first(account: Account) -> None:
    (instance,) = account.running()
    first, second = (account.ec2.allocate_address() for _ in range(2))
    for address in (first, second):
        account.ec2.associate_address(AllocationId=address["AllocationId"], InstanceId=instance["InstanceId"])
    listed = {a["AllocationId"]: a.get("InstanceId") for a in account.ec2.describe_addresses()["Addresses"]}
    assert listed[second["AllocationId"]] == instance["InstanceId"]
    assert not listed[first["AllocationId"]]


def test_the_number_of_addresses_can_be_limited(account: Account) -> None:
    account.conditions(quota={"addresses": 1})
    account.ec2.allocate_address()
    with refused("AddressLimitExceeded"):
        account.ec2.allocate_address()


def test_addresses_are_found_by_tag(account: Account) -> None:
    tags = [{"ResourceType": "elastic-ip", "Tags": [{"Key": "of", "Value": "a"}]}]
    address = account.ec2.allocate_address(TagSpecifications=tags)["AllocationId"]
    account.ec2.allocate_address()
    wanted = [{"Name": "tag:of", "Values": ["a"]}]
    assert [a["AllocationId"] for a in account.ec2.describe_addresses(Filters=wanted)["Addresses"]] == [
        address
    ]


def test_a_node_of_the_lab_answers_on_its_elastic_ip_and_no_longer_where_it_did(resident: LabLaptop) -> None:
    (instance,) = resident.launch()
    before = shell(resident.login(instance), "hostname")
    address = resident.ec2.allocate_address()
    resident.ec2.associate_address(AllocationId=address["AllocationId"], InstanceId=instance["InstanceId"])
    (moved,) = resident.describe(instance["InstanceId"])
    assert moved["PublicIpAddress"] == address["PublicIp"]
    assert shell(resident.login(moved), "hostname") == before
    with inside(resident.sim), pytest.raises(OSError):
        socket.create_connection((instance["PublicIpAddress"], 22), timeout=2)
    resident.terminate(instance["InstanceId"])
    resident.ec2.release_address(AllocationId=address["AllocationId"])


def test_no_public_address_is_given_twice_and_an_empty_pool_says_so(resident: LabLaptop) -> None:
    ec2 = resident.client("ec2", config=Config(retries={"total_max_attempts": 1}))
    (node,) = resident.launch()
    given: list[dict[str, str]] = []
    try:
        with refused("InsufficientAddressCapacity") as said:
            given.extend(ec2.allocate_address() for _ in range(300))  # there are 254
        assert said.status == 500
        addresses = {address["PublicIp"] for address in given}
        assert len(addresses) == len(given)
        assert node["PublicIpAddress"] not in addresses
        before = ec2.describe_network_interfaces()["NetworkInterfaces"]
        request = {"ImageId": resident.image, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
        with refused("InsufficientAddressCapacity"):
            ec2.run_instances(**request)
        assert ec2.describe_network_interfaces()["NetworkInterfaces"] == before
        ec2.release_address(AllocationId=given[0]["AllocationId"])
        again = ec2.allocate_address()
        assert again["PublicIp"] == given.pop(0)["PublicIp"]
        given.append(again)
    finally:
        for address in given:
            ec2.release_address(AllocationId=address["AllocationId"])
