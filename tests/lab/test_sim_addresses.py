"""Private addresses, subnets and Elastic IPs."""

from __future__ import annotations

import pytest
from support.account import Account, refused


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
